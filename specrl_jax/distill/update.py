"""One update of a drafter: it learns the actor's distribution on the actor's own sequences.

Targets are recomputed from the actor's final hidden states over the whole vocabulary, chunk by
chunk: no array of vocabulary times tokens is ever whole in memory. Nothing here has a gradient with
respect to the actor. What the drafter is, only `TrainableDrafter` knows.

Shapes: `n` micro-batches of `b` rows, `S` columns of prompt and response, `T` response tokens that
any row may have, `J` draft depths, `C` columns of a chunk, `Vd` draft vocabulary, `A` tapped
layers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from specrl_kernels.noise import gumbel

from specrl_jax.config import DistillOptions
from specrl_jax.distill.losses import LOSSES, acceptance
from specrl_jax.draft.trainable import DraftInputs, TrainableDrafter, columns
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.transformer import Params
from specrl_jax.rl import learner
from specrl_jax.structs import Array, DrafterParams, Metrics, Rollout

TOKENS_AT_ONCE = 256  # positions whose full-vocabulary logits exist at once
ANCHORS_AT_ONCE = 2048  # positions whose draft-vocabulary log-probabilities exist at once


class DistillState(struct.PyTreeNode):
    """What an update reads and writes; no part of it is the actor's."""

    params: DrafterParams  # float32
    optimizer: optax.OptState


class UpdateResult(NamedTuple):
    """The outcome of some updates in a row."""

    state: DistillState
    metrics: list[dict[str, Any]]  # of each update, on the host
    seconds: float


class FrozenParams(struct.PyTreeNode):
    """Parameters of the actor that the drafter and its targets read."""

    embed: Array  # f[V, F]
    head: Array  # f[Vd, F] rows of the draft vocabulary
    vocab: Array  # i32[Vd]
    teachers: Array  # f[H, Vd, F] the head of each of H policy versions that made targets


class SequenceBatch(struct.PyTreeNode):
    """Right-padded sequences: n micro-batches of b rows, without n where one of them is meant."""

    tokens: Any  # i32[n, b, S]
    length: Any  # i32[n, b] of prompt and response; 0 pads
    first: Any  # i32[n, b] column of the first response token, at least 1
    temperature: Any  # f32[n, b] positive
    reward: Any  # f32[n, b]
    advantage: Any  # f32[n, b]


class TeacherTargets(struct.PyTreeNode):
    """What one forward of the actor leaves of a `SequenceBatch`; k counts response tokens."""

    taps: Any  # f[n, A * F, b, S]
    hidden: Any  # f[n, F, b, T] final hidden states that predict response tokens
    normalizer: Any  # f32[n, b, T] log-sum-exp of logits over temperature, whole vocabulary
    best: Any  # i32[n, b, T] the actor's most likely token
    entropy: Any  # f32[n, b, T] of the actor at that temperature, whole vocabulary, in nats
    teacher: Any  # i32[n] index in FrozenParams.teachers of the version that made them


def sequence_batch(rollout: Rollout, reward: np.ndarray, advantage: np.ndarray, temperature: float,
                   rows: int) -> SequenceBatch:
    """Returns a rollout as host arrays, in its order; S = P + T, b = rows.

    Args:
      reward, advantage: f32[Q].
      temperature: 0 counts as 1.
    """
    buffer = rollout.tokens.shape[1]
    column = np.arange(rollout.prompt.shape[1] + buffer)[None]
    place = column - rollout.prompt_length[:, None]
    response = np.take_along_axis(rollout.tokens, np.clip(place, 0, buffer - 1), 1)
    length = rollout.prompt_length + rollout.length
    whole = np.where(place < 0, np.pad(rollout.prompt, ((0, 0), (0, buffer))), response)

    def split(values: Any, pad: float, dtype: Any) -> np.ndarray:
        values = np.asarray(values, dtype)
        missing = np.full((-len(values) % rows, *values.shape[1:]), pad, dtype)
        return np.concatenate([values, missing]).reshape(-1, rows, *values.shape[1:])

    return SequenceBatch(
        tokens=split(np.where(column < length[:, None], whole, 0), 0, np.int32),
        length=split(length, 0, np.int32), first=split(rollout.prompt_length, 1, np.int32),
        temperature=split(np.full(len(length), temperature or 1.0), 1, np.float32),
        reward=split(reward, 0, np.float32), advantage=split(advantage, 0, np.float32))


# The teacher.


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
                          teacher=jnp.int32(0))


def _summaries(arch: Architecture, actor: Params, hidden: Array, temperature: Array
               ) -> tuple[Array, Array, Array]:
    """Returns log-normaliser, best token and entropy [b, T] of hidden f[F, b, T], in chunks."""

    def one(at: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        scores = transformer.logits(arch, actor, at[0]) / at[1]
        total = jax.nn.logsumexp(scores)
        mean = (jnp.exp(scores - total) * scores).sum()
        return total, scores.argmax().astype(jnp.int32), total - mean

    flat = (hidden.reshape(len(hidden), -1).T, temperature.reshape(-1))
    found = jax.lax.map(one, flat, batch_size=min(TOKENS_AT_ONCE, len(flat[1])))
    normalizer, best, entropy = (x.reshape(temperature.shape) for x in found)
    return normalizer, best, entropy


def live_anchors(length: Array, first: Array, window: int, depths: int) -> Array:
    """Returns bool[J, b, T]: whether the draft of depth j from anchor k predicts a response token.

    Anchor k has seen k response tokens; its draft of depth j predicts response token k + j. A draft
    starts from a token whose predecessor the actor has seen too.
    """
    k = jnp.arange(window)[None, None]
    depth = jnp.arange(depths)[:, None, None]
    inside = k + depth < (length - first)[None, :, None]
    return inside & ((first - 2)[None, :, None] + k >= 0)


class Aligned(struct.PyTreeNode):
    """The actor's side of some response tokens, [..., b, T] or a chunk of it."""

    hidden: Array  # f[F, b, T]
    normalizer: Array  # f32[b, T]
    extra: Any = ()  # further arrays [..., b, T]


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
        return jax.lax.stop_gradient(
            scores / self.temperature[None, :, None] - at.normalizer[None])

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
            found = [depth(params, output, log_p, j) for j, output in enumerate(outputs)]
            terms, alpha = (jnp.stack(x) for x in zip(*found, strict=True))
            return terms, alpha

        terms, alpha = in_chunks(chunk, outputs, self.aligned)
        values = jax.vmap(chosen.combine, (1, 1, None, None))(
            terms, self.mask, self.count, self.options.depth_decay)
        accepted = jnp.where(self.mask, alpha, 0)
        return (self.weight * values).sum(), {"alpha": accepted.sum((1, 2)),
                                              "chain": jnp.cumprod(accepted, 0).sum()}


def in_chunks(run: Callable[[Sequence[Array], Aligned], Any], outputs: Sequence[Array],
              aligned: Aligned) -> Any:
    """Runs a function over chunks of at most ANCHORS_AT_ONCE anchors, recomputed for gradients.

    Args:
      run: (J outputs [..., b, C], aligned arrays [..., b, C + J - 1]) -> a tree of [J, b, C].
        Column k + j of the latter belongs to column k of output j; beyond T they are zeros.
      outputs: J arrays [..., b, T].

    Returns:
      the tree of `run`, leaves [J, b, T].
    """
    rows, total = outputs[0].shape[-2:]
    overlap, size = len(outputs) - 1, max(ANCHORS_AT_ONCE // rows, 1)
    count = -(-total // size)

    def pad(a: Array, columns: int) -> Array:
        return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, columns)])

    if count == 1:
        return run(outputs, jax.tree.map(lambda a: pad(a, overlap), aligned))
    spare = count * size - total
    aligned = jax.tree.map(lambda a: pad(a, spare + overlap), aligned)
    split = [jnp.moveaxis(pad(a, spare).reshape(*a.shape[:-1], count, size), -2, 0)
             for a in outputs]

    @jax.checkpoint
    def one(at: tuple[Array, list[Array]]) -> Any:
        return run(at[1], jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(
            a, at[0] * size, size + overlap, -1), aligned))

    found = jax.lax.map(one, (jnp.arange(count), split))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, -2).reshape(*a.shape[1:-1], -1)[..., :total],
                        found)


# The update.


def make_optimizer(options: DistillOptions) -> optax.GradientTransformation:
    """Returns AdamW behind clipping by global norm; warm-up, then constant or a linear decay."""
    rate, warm = options.learning_rate, options.warmup_steps
    parts = [optax.linear_schedule(rate / (warm + 1), rate, warm)]
    parts += [optax.linear_schedule(rate, 0.0, options.decay_steps - warm)
              if options.decay_steps else optax.constant_schedule(rate)]
    return optax.chain(
        optax.clip_by_global_norm(options.max_grad_norm),
        optax.adamw(optax.join_schedules(parts, [warm]), b1=options.b1, b2=options.b2,
                    weight_decay=options.weight_decay))


def init_state(options: DistillOptions, params: DrafterParams) -> DistillState:
    """Returns the state before the first update."""
    return DistillState(params, make_optimizer(options).init(params))


def _inputs(frozen: FrozenParams, batch: SequenceBatch, teacher: TeacherTargets) -> DraftInputs:
    return DraftInputs(tokens=batch.tokens, length=batch.length, first=batch.first,
                       taps=teacher.taps, embed=frozen.embed, head=frozen.head,
                       window=teacher.hidden.shape[2])


def _targets(options: DistillOptions, depths: int, frozen: FrozenParams, batch: SequenceBatch,
             teacher: TeacherTargets, count: Array, weight: Array, extra: Any = ()) -> Targets:
    head = jax.lax.dynamic_index_in_dim(frozen.teachers, teacher.teacher, 0, False)
    mask = live_anchors(batch.length, batch.first, teacher.hidden.shape[2], depths)
    return Targets(Aligned(teacher.hidden, teacher.normalizer, extra), head, batch.temperature,
                   mask, count, weight, options)


def micro_loss(drafter: TrainableDrafter, options: DistillOptions, params: DrafterParams,
               frozen: FrozenParams, count: Array, batch: SequenceBatch, teacher: TeacherTargets,
               weight: Array) -> tuple[Array, Metrics]:
    """Returns a micro-batch's share of the loss f32[], and sums of its metrics.

    Args:
      count: f32[J], live anchors of each depth in the whole batch.
      weight: f32[b].
    """
    frozen, teacher = jax.lax.stop_gradient((frozen, teacher))
    return drafter.loss(params, _inputs(frozen, batch, teacher), _targets(
        options, options.unroll, frozen, batch, teacher, count, weight))


def update(drafter: TrainableDrafter, options: DistillOptions, state: DistillState,
           frozen: FrozenParams, batch: SequenceBatch, teacher: TeacherTargets
           ) -> tuple[DistillState, dict[str, Array]]:
    """Runs one optimiser step over n micro-batches; how they are split changes nothing.

    A loss or gradient that is not finite leaves the state as it was.

    Returns:
      The new state, and metrics: loss, grad_norm, applied (0 or 1), tokens (response tokens), and
      accept_length (expected tokens of a round with a chain of depth J, rejection sampling), all
      f32[]; alpha f32[J], the acceptance rate of each depth given that it is reached.
    """
    window = teacher.hidden.shape[3]
    masks = jax.vmap(live_anchors, (0, 0, None, None))(
        batch.length, batch.first, window, options.unroll)
    count = jnp.maximum(masks.sum((0, 2, 3), dtype=jnp.float32), 1.0)
    weight = LOSSES[options.loss].weigh(batch.reward, batch.advantage, batch.length > 0)
    grad = jax.value_and_grad(
        lambda params, *at: micro_loss(drafter, options, params, frozen, count, *at), has_aux=True)

    def accumulate(total: Any, at: tuple[SequenceBatch, TeacherTargets, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad(state.params, *at)), None

    micro = (batch, teacher, weight)
    shapes = jax.eval_shape(grad, state.params, *jax.tree.map(lambda a: a[0], micro))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    ((value, metrics), grads), _ = jax.lax.scan(accumulate, zeros, micro)
    old = learner.LearnerState(state.params, state.optimizer)
    new, applied, norm = learner.apply(make_optimizer(options), old, grads, value)
    return DistillState(new.params, new.optimizer), {
        "loss": value, "grad_norm": norm, "applied": applied, "tokens": count[0],
        "accept_length": 1.0 + metrics["chain"] / count[0], "alpha": metrics["alpha"] / count}


# Evaluation.


class Evaluation(struct.PyTreeNode):
    """How a drafter did on a micro-batch, at the anchors of `live_anchors`."""

    alpha: Array  # f32[J, b, T] acceptance rate
    agree: Array  # bool[J, b, T] drafter and actor find the same token most likely
    match: Array  # bool[J, b, T] the draft with the actor's noise is the response's token
    live: Array  # bool[J, b, T]


def evaluate_drafter(drafter: TrainableDrafter, options: DistillOptions, params: DrafterParams,
                     frozen: FrozenParams, batch: SequenceBatch, teacher: TeacherTargets,
                     key: Array, scale: Array) -> Evaluation:
    """Compares drafts of a micro-batch with the actor, each given that those before were right.

    Args:
      drafter: with `outputs` and `logits`.
      key, scale: see `noise`.
    """
    assert drafter.outputs is not None and drafter.logits is not None
    logits, depths = drafter.logits, options.unroll
    inputs = _inputs(frozen, batch, teacher)
    place = jnp.broadcast_to(jnp.arange(inputs.window)[None], teacher.best.shape)
    targets = _targets(options, depths, frozen, batch, teacher, jnp.ones(depths), jnp.ones(len(
        batch.length)), extra=(teacher.best, inputs.tokens_at(0), place))

    def chunk(outputs: Sequence[Array], at: Aligned) -> tuple[Array, ...]:
        log_p, (best, response, place) = targets.log_probs(at), at.extra
        drawn, found = noise(frozen.vocab, place, key, scale), []
        for j, output in enumerate(outputs):
            def shift(a: Array, j: int = j, size: int = output.shape[-1]) -> Array:
                return a[..., j:][..., :size]

            log_q = targets.log_draft(logits(params, inputs, output))
            found.append((
                jax.vmap(acceptance, in_axes=1)(shift(log_p), log_q),
                frozen.vocab[log_q.argmax(0)] == shift(best),
                frozen.vocab[(log_q + shift(drawn)).argmax(0)] == shift(response)))
        return tuple(jnp.stack(x) for x in zip(*found, strict=True))

    outputs = drafter.outputs(params, inputs, depths)
    return Evaluation(*in_chunks(chunk, outputs, targets.aligned), live=targets.mask)


def noise(vocab: Array, place: Array, key: Array, scale: Array) -> Array:
    """Returns the noise f32[Vd, b, C] that response tokens were drawn with, see prng.row_keys.

    Args:
      place: i32[b, C], indices of response tokens.
      key: u32[b, 2].
      scale: f32[b], 0 for rows that were drawn greedily, else 1.
    """
    drawn = gumbel(key[:, None], place, vocab) * scale[:, None, None]
    return jnp.moveaxis(drawn, -1, 0)
