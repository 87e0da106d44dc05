"""Training data of a drafter on the devices: sequences, and the actor's distribution on them.

The actor's distributions are recomputed from its final hidden states, chunk by chunk: no array of
vocabulary times tokens is ever whole in memory.

Shapes: `n` micro-batches of `b` rows, `S` columns of prompt and response, `T` response tokens that
any row may have, `J` draft depths, `C` columns of a chunk, `Vd` draft vocabulary, `A` tapped
layers.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import DistillOptions
from specrl_jax.distill.losses import LOSSES, acceptance
from specrl_jax.draft.trainable import DraftInputs, columns
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.transformer import Params
from specrl_jax.structs import AnyArray, Array, DrafterParams, Metrics, PyTree

TOKENS_AT_ONCE = 256  # positions whose full-vocabulary logits exist at once
DEPTH_DECAY = 0.8  # weight of each draft depth relative to the one before it
ANCHORS_AT_ONCE = 2048  # positions whose draft-vocabulary log-probabilities exist at once
EVERY = -2  # in `TeacherTargets.drafted`: every depth is trained


class FrozenParams(struct.PyTreeNode):
    """Parameters of the actor that the drafter and its targets read."""

    embed: Array  # f[V, F]
    head: Array  # f[Vd, F] rows of the draft vocabulary
    vocab: Array  # i32[Vd]
    teachers: Array  # f[H, Vd, F] the head of each of H policy versions that made targets


class SequenceBatch(struct.PyTreeNode):
    """Right-padded sequences: n micro-batches of b rows, or one without n."""

    tokens: AnyArray  # i32[n, b, S]
    length: AnyArray  # i32[n, b] of prompt and response; 0 pads
    first: AnyArray  # i32[n, b] column of the first response token, at least 1
    temperature: AnyArray  # f32[n, b] positive
    reward: AnyArray  # f32[n, b]
    advantage: AnyArray  # f32[n, b]


class TeacherTargets(struct.PyTreeNode):
    """What one forward of the actor leaves of a `SequenceBatch`; k counts response tokens."""

    taps: AnyArray  # f[n, A * F, b, S]
    hidden: AnyArray  # f[n, F, b, T] final hidden states that predict response tokens
    normalizer: AnyArray  # f32[n, b, T] log-sum-exp of logits over temperature, whole vocabulary
    best: AnyArray  # i32[n, b, T] the actor's most likely token
    entropy: AnyArray  # f32[n, b, T] of the actor at that temperature, whole vocabulary, in nats
    drafted: AnyArray  # i32[n, b, T] the only depth at which a token is trained, or EVERY
    teacher: AnyArray  # i32[n] index in FrozenParams.teachers of the version that made them


Batch = tuple[SequenceBatch, TeacherTargets]


def in_rows(members: np.ndarray, width: int) -> np.ndarray:
    """Returns `members` as rows of `width`, the last one filled up with -1."""
    rows = np.full(-(-len(members) // width) * width, -1)
    rows[: len(members)] = members
    return rows.reshape(-1, width)


def batch_of(rows: np.ndarray, tokens: Callable[[int], np.ndarray], columns: int,
             temperature: float, **values: np.ndarray) -> SequenceBatch:
    """Returns the sequences `rows` i64[n, b] as host arrays [n, b, ...]; row -1 is padding.

    Args:
      tokens: of a sequence.
      temperature: 0 counts as 1.
      values: `length`, `first`, `reward` and `advantage` of all sequences.
    """
    used, padded = rows >= 0, np.zeros((*rows.shape, columns), np.int32)
    for i, j in np.argwhere(used):
        sequence = tokens(int(rows[i, j]))
        padded[i, j, : len(sequence)] = sequence
    taken = {name: np.where(used, of_all[rows], int(name == "first")).astype(of_all.dtype)
             for name, of_all in values.items()}
    return SequenceBatch(tokens=padded, **taken,
                         temperature=np.full(rows.shape, temperature or 1.0, np.float32))


def draft_rows(arch: Architecture, actor: Params, vocab: Array) -> Array:
    """Returns f[Vd, F], the actor's output head for the draft vocabulary i32[Vd]."""
    head = actor["embed" if arch.tied else "head"]
    return head if len(vocab) == arch.vocab_size else head[vocab]


def frozen_params(arch: Architecture, actor: Params, vocab: Array) -> FrozenParams:
    """Returns what is read of an actor that is the only teacher."""
    head = draft_rows(arch, actor, vocab)
    return FrozenParams(actor["embed"], head, vocab, head[None])


def compute_targets(arch: Architecture, taps: tuple[int, ...], window: int, actor: Params,
                    batch: SequenceBatch) -> TeacherTargets:
    """Runs one forward of the actor over a micro-batch; `window` is T."""
    tokens = batch.tokens
    hidden, _, tapped = transformer.hidden_states(
        arch, actor, tokens, *transformer.right_padded(tokens.shape, batch.length), taps=taps)
    tapped = jnp.zeros((0, *tokens.shape), hidden.dtype) if tapped is None else tapped
    at = columns(batch.first - 1, window, tokens.shape[1])
    predicting = jnp.take_along_axis(hidden, at[None], axis=2)
    temperature = jnp.broadcast_to(batch.temperature[:, None], at.shape)
    return TeacherTargets(tapped, predicting, *_summaries(arch, actor, predicting, temperature),
                          drafted=jnp.full(at.shape, EVERY, jnp.int32), teacher=jnp.int32(0))


def from_records(arch: Architecture, window: int, actor: Params, batch: SequenceBatch,
                 states: Array, drafted: Array, raw_logprob: Array) -> TeacherTargets:
    """Returns the targets of a micro-batch without a forward of the actor.

    The log-probability of the drawn token gives the normaliser; `best` and `entropy` stay 0, since
    no logits are computed.

    Args:
      window: T.
      states, drafted: f[b, S, (A+1) * F] and i32[b, T] of Records; raw_logprob: f32[b, T].
    """
    f, tokens, t = arch.hidden_size, batch.tokens, window
    tall = jnp.moveaxis(states, -1, 0)
    at = columns(batch.first - 1, t, tokens.shape[1])
    hidden = jnp.take_along_axis(tall[-f:], at[None], axis=2)
    token = jnp.take_along_axis(tokens, columns(batch.first, t, tokens.shape[1]), 1)
    rows = actor["embed" if arch.tied else "head"][token]  # f[b, T, F]
    score = jnp.einsum("btf,fbt->bt", rows, hidden, preferred_element_type=jnp.float32)
    real = jnp.arange(t)[None] < (batch.length - batch.first)[:, None]
    normalizer = jnp.where(real, score / batch.temperature[:, None] - raw_logprob, 0)
    return TeacherTargets(tall[:-f], hidden, normalizer, jnp.zeros_like(at),
                          jnp.zeros_like(normalizer), drafted=drafted, teacher=jnp.int32(0))


def _summaries(arch: Architecture, actor: Params, hidden: Array, temperature: Array
               ) -> tuple[Array, Array, Array]:
    """Returns log-normaliser, best token and entropy [b, T] of hidden f[F, b, T], in chunks."""
    def one(at: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        scores = transformer.logits(arch, actor, at[0]) / at[1]
        total = jax.nn.logsumexp(scores)
        mean = (jnp.exp(scores - total) * scores).sum()
        return total, scores.argmax().astype(jnp.int32), total - mean

    flat = (hidden.reshape(len(hidden), -1).T, temperature.reshape(-1))
    return jax.tree.map(lambda x: x.reshape(temperature.shape), jax.lax.map(
        one, flat, batch_size=min(TOKENS_AT_ONCE, len(flat[1]))))


def live_anchors(length: Array, first: Array, drafted: Array, depths: int) -> Array:
    """Returns bool[J, b, T]: whether the draft of depth j from anchor k is trained.

    Anchor k has seen k response tokens; its draft of depth j predicts token k + j, if there is one.
    A draft starts from a token whose predecessor the actor has seen too. See
    `TeacherTargets.drafted`, i32[b, T].
    """
    k, depth = jnp.arange(drafted.shape[1])[None, None], jnp.arange(depths)[:, None, None]
    later = jnp.stack([jnp.pad(drafted, ((0, 0), (0, j)))[:, j:] for j in range(depths)])
    return ((k + depth < (length - first)[None, :, None]) & ((first - 2)[None, :, None] + k >= 0)
            & ((later == EVERY) | (later == depth)))


class Aligned(struct.PyTreeNode):
    """The actor's side of some response tokens, [..., b, T] or a chunk of it."""

    hidden: Array  # f[F, b, T]
    normalizer: Array  # f32[b, T]
    extra: PyTree = ()  # further arrays [..., b, T]


class Targets(struct.PyTreeNode):
    """The actor's distribution at the response tokens of a micro-batch; see draft/trainable.py."""

    aligned: Aligned
    head: Array  # f[Vd, F] of the version that made them
    temperature: Array  # f32[b]
    mask: Array  # bool[J, b, T] of `live_anchors`
    count: Array  # f32[J] live anchors of each depth in the whole batch
    weight: Array  # f32[b] of each sequence
    options: DistillOptions = struct.field(pytree_node=False)

    @property
    def depths(self) -> int:
        return self.options.unroll

    def log_probs(self, of: Aligned | None = None) -> Array:
        """Returns log p f32[Vd, b, T] of the draft vocabulary, without gradient."""
        at = self.aligned if of is None else of
        scores = transformer.project(self.head, at.hidden, dtype=jnp.float32)
        return jax.lax.stop_gradient(scores / self.temperature[None, :, None] - at.normalizer[None])

    def log_draft(self, logits: Array) -> Array:
        """Returns log q f32[Vd, b, C] of a drafter's logits."""
        return jax.nn.log_softmax(logits / self.temperature[None, :, None], axis=0)

    def loss(self, params: DrafterParams, outputs: Sequence[Array],
             logits: Callable[[DrafterParams, Array], Array]) -> tuple[Array, Metrics]:
        chosen = LOSSES[self.options.loss]

        @functools.partial(jax.checkpoint, static_argnums=3)
        def depth(params: DrafterParams, output: Array, log_p: Array, j: int
                  ) -> tuple[Array, Array]:
            pair = log_p[..., j:][..., : output.shape[-1]], self.log_draft(logits(params, output))
            return (jax.vmap(chosen.term, in_axes=1)(*pair),
                    jax.lax.stop_gradient(jax.vmap(acceptance, in_axes=1)(*pair)))

        def chunk(outputs: Sequence[Array], at: Aligned) -> tuple[Array, Array]:
            log_p = self.log_probs(at)
            depths = [depth(params, output, log_p, j) for j, output in enumerate(outputs)]
            return jax.tree.map(lambda *x: jnp.stack(x), *depths)

        terms, alpha = in_chunks(chunk, outputs, self.aligned)
        values = jax.vmap(chosen.combine, (1, 1, None, None))(
            terms, self.mask, self.count, DEPTH_DECAY)
        accepted = jnp.where(self.mask, alpha, 0)
        return (self.weight * values).sum(), {"alpha": accepted.sum((1, 2)),
                                              "chain": jnp.cumprod(accepted, 0).sum()}


def in_chunks(run: Callable[[Sequence[Array], Aligned], PyTree], outputs: Sequence[Array],
              aligned: Aligned) -> PyTree:
    """Runs a function over chunks of at most ANCHORS_AT_ONCE anchors, recomputed for gradients.

    Args:
      run: (J outputs [..., b, C], aligned arrays [..., b, C + J - 1]) -> a tree of [J, b, C].
        Column k + j of the latter belongs to column k of output j; beyond T they are zeros.
      outputs: J arrays [..., b, T].

    Returns the tree of `run`, leaves [J, b, T].
    """
    rows, total = outputs[0].shape[-2:]
    overlap, size = len(outputs) - 1, max(ANCHORS_AT_ONCE // rows, 1)
    count = -(-total // size)

    def pad(a: Array, columns: int) -> Array:
        return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, columns)])

    spare = count * size - total if count > 1 else 0
    aligned = jax.tree.map(lambda a: pad(a, spare + overlap), aligned)
    if count == 1:
        return run(outputs, aligned)
    split = [jnp.moveaxis(pad(a, spare).reshape(*a.shape[:-1], count, size), -2, 0)
             for a in outputs]

    @jax.checkpoint
    def one(at: tuple[Array, list[Array]]) -> PyTree:
        return run(at[1], jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(
            a, at[0] * size, size + overlap, -1), aligned))

    chunks = jax.lax.map(one, (jnp.arange(count), split))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, -2).reshape(*a.shape[1:-1], -1)[..., :total],
                        chunks)


def inputs_of(frozen: FrozenParams, batch: Batch) -> DraftInputs:
    """Returns what a drafter may read of a micro-batch."""
    sequences, made = batch
    return DraftInputs(tokens=sequences.tokens, length=sequences.length, first=sequences.first,
                       taps=made.taps, embed=frozen.embed, head=frozen.head,
                       window=made.hidden.shape[2])


def targets_of(options: DistillOptions, frozen: FrozenParams, batch: Batch,
               share: tuple[Array, Array], extra: PyTree = ()) -> Targets:
    """Returns the targets of a micro-batch, whose `share` is `count` and `weight` of `Targets`."""
    sequences, made = batch
    head = jax.lax.dynamic_index_in_dim(frozen.teachers, made.teacher, 0, False)
    mask = live_anchors(sequences.length, sequences.first, made.drafted, options.unroll)
    return Targets(Aligned(made.hidden, made.normalizer, extra), head, sequences.temperature, mask,
                   *share, options)
