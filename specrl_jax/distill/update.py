"""Distillation: the drafter learns the actor's distribution where the actor has been.

Its targets are recomputed from the actor's final hidden states, over the whole vocabulary, a
micro-batch at a time; nothing here has a gradient with respect to the actor. Of a micro-batch the
actor's [Vd, tokens] exists once, and the drafter's for one depth at a time.

Further letters: `J` unrolled steps, `Vd` draft vocabulary, `S` = columns of prompt and response
together, `T` here the response tokens that any row may have, `A` tapped layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from specrl_kernels.noise import gumbel

from specrl_jax.config import DistillOptions
from specrl_jax.distill.losses import LOSSES, acceptance
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.transformer import Params
from specrl_jax.rl import learner
from specrl_jax.structs import Array, Rollout

TOKENS_AT_ONCE = 256  # of which full-vocabulary logits exist


@struct.dataclass
class DistillState:
    """What an update reads and writes; no part of it is the actor's."""

    params: Params  # float32
    optimizer: Any


@struct.dataclass
class Lent:
    """What the drafter reads of the actor's parameters."""

    embed: Array  # f[V, F]
    head: Array  # f[Vd, F] rows of the draft vocabulary
    vocab: Array  # i32[Vd]
    teachers: Array  # f[H, Vd, F] such rows of the actors that taught: H policy versions


@struct.dataclass
class Texts:
    """Sequences, n micro-batches of b rows, right-padded; without n in what takes one of them."""

    tokens: Array  # i32[n, b, S]
    length: Array  # i32[n, b] of prompt and response; 0 pads
    first: Array  # i32[n, b] index of the first response token, at least 1
    temperature: Array  # f32[n, b] positive
    reward: Array  # f32[n, b]
    advantage: Array  # f32[n, b]


@struct.dataclass
class Lessons:
    """What the actor thought of `Texts`. k counts response tokens."""

    taps: Array  # f[n, A * F, b, S]
    hidden: Array  # f[n, F, b, T] final, of the positions that predict response tokens
    normalizer: Array  # f32[n, b, T] log-sum-exp of logits over temperature, whole vocabulary
    best: Array  # i32[n, b, T] the actor's most likely token
    entropy: Array  # f32[n, b, T] of the actor with temperature, whole vocabulary, in nats
    teacher: Array  # i32[n] whose hidden states these are, see Lent.teachers


def make_texts(rollout: Rollout, reward: np.ndarray, advantage: np.ndarray, temperature: float,
               rows: int) -> Texts:
    """A rollout as host arrays, in its order; S = P + T, b = rows. Temperature 0 counts as 1.

    Args:
      reward, advantage: f32[Q].
    """
    buffer = rollout.tokens.shape[1]
    column = np.arange(rollout.prompt.shape[1] + buffer)[None]
    place = column - rollout.prompt_length[:, None]
    said = np.take_along_axis(rollout.tokens, np.clip(place, 0, buffer - 1), 1)
    length = rollout.prompt_length + rollout.length
    whole = np.where(place < 0, np.pad(rollout.prompt, ((0, 0), (0, buffer))), said)

    def split(values: Any, pad: float, dtype: Any) -> np.ndarray:
        values = np.asarray(values, dtype)
        missing = np.full((-len(values) % rows, *values.shape[1:]), pad, dtype)
        return np.concatenate([values, missing]).reshape(-1, rows, *values.shape[1:])

    return Texts(
        tokens=split(np.where(column < length[:, None], whole, 0), 0, np.int32),
        length=split(length, 0, np.int32), first=split(rollout.prompt_length, 1, np.int32),
        temperature=split(np.full(len(length), temperature or 1.0), 1, np.float32),
        reward=split(reward, 0, np.float32), advantage=split(advantage, 0, np.float32))


def lend(arch: EagleArch, actor: Params, vocab: Array) -> Lent:
    """The drafter's part of the parameters of an actor that is its own only teacher."""
    head = eagle_model.draft_head(arch, actor, vocab)
    return Lent(actor["embed"], head, vocab, head[None])


def teach(arch: EagleArch, window: int, actor: Params, texts: Texts) -> Lessons:
    """One forward of the actor over a micro-batch; `window` is T."""
    tokens = texts.tokens
    hidden, _, taps = transformer.hidden_states(
        arch.actor, actor, tokens,
        *transformer.right_padded(tokens.shape, texts.length), taps=arch.taps)
    predicting = _window(hidden, texts.first - 1, window)
    temperature = jnp.broadcast_to(texts.temperature[:, None], predicting.shape[1:])
    return Lessons(taps, predicting, *_summaries(arch.actor, actor, predicting, temperature),
                   teacher=jnp.int32(0))


def _summaries(arch: Architecture, actor: Params, hidden: Array, temperature: Array
               ) -> tuple[Array, Array, Array]:
    """Log-normaliser, best token and entropy [b, T] of hidden f[F, b, T], in chunks."""

    def one(at: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        scores = transformer.logits(arch, actor, at[0]) / at[1]
        total = jax.nn.logsumexp(scores)
        mean = (jnp.exp(scores - total) * scores).sum()
        return total, scores.argmax().astype(jnp.int32), total - mean

    flat = (hidden.reshape(len(hidden), -1).T, temperature.reshape(-1))
    summaries = jax.lax.map(one, flat, batch_size=min(TOKENS_AT_ONCE, len(flat[1])))
    return tuple(x.reshape(temperature.shape) for x in summaries)


def _window(x: Array, start: Array, size: int) -> Array:
    """`size` columns of x [F, b, S] from start i32[b] on; those outside repeat the nearest one."""
    return jnp.take_along_axis(x, _places(start, size, x.shape[2])[None], axis=2)


def _places(start: Array, size: int, total: int) -> Array:
    """i32[b, size] columns from start i32[b] on, the nearest of 0..total-1 for those outside."""
    return jnp.clip(start[:, None] + jnp.arange(size)[None], 0, total - 1)


def targets(lent: Lent, temperature: Array, lessons: Lessons) -> Array:
    """log p of the draft vocabulary at each response token, f32[Vd, b, T], without gradient."""
    head = jax.lax.dynamic_index_in_dim(lent.teachers, lessons.teacher, 0, False)
    scores = transformer.project(head, lessons.hidden, dtype=jnp.float32)
    return jax.lax.stop_gradient(
        scores / temperature[None, :, None] - lessons.normalizer[None])


def live(length: Array, first: Array, window: int, steps: int) -> Array:
    """bool[J, b, T]: the draft of depth j from anchor k predicts response token k + j.

    A draft starts from a token that was said, or from the prompt's last: anchor k has seen k
    response tokens, and its feature is that of the token before the last of them.
    """
    k = jnp.arange(window)[None, None]
    depth = jnp.arange(steps)[:, None, None]
    inside = k + depth < (length - first)[None, :, None]
    return inside & ((first - 2)[None, :, None] + k >= 0)


def drafts(arch: EagleArch, steps: int, window: int, params: Params, lent: Lent, texts: Texts,
           lessons: Lessons) -> list[Array]:
    """The network's outputs at the anchors of `live`, f[F, b, T] for each depth."""
    features = eagle_model.project(params, lessons.taps)
    anchors = _places(texts.first - 2, window, texts.tokens.shape[1])
    return eagle_model.unroll(arch, params, lent.embed, features, texts.tokens, texts.length,
                              anchors, steps)


def log_draft(arch: EagleArch, params: Params, lent: Lent, temperature: Array, hidden: Array
              ) -> Array:
    """log q f32[Vd, b, T] of outputs f[F, b, T]."""
    scores = eagle_model.logits(arch, params, lent.head, hidden)
    return jax.nn.log_softmax(scores / temperature[None, :, None], axis=0)


def shifted(x: Array, depth: int) -> Array:
    """Column k is column k + depth of x [..., T]; the last ones are not `live`."""
    return jnp.roll(x, -depth, axis=-1)


def micro_loss(arch: EagleArch, options: DistillOptions, params: Params, lent: Lent, count: Array,
               texts: Texts, lessons: Lessons, weight: Array) -> tuple[Array, dict[str, Array]]:
    """A micro-batch's share of the loss f32[], and sums of its metrics.

    Args:
      count: f32[J], live anchors of each depth in the whole batch.
      weight: f32[b].
    """
    lent, lessons = jax.lax.stop_gradient((lent, lessons))
    loss, window = LOSSES[options.loss], lessons.hidden.shape[2]
    mask = live(texts.length, texts.first, window, options.unroll)
    log_p = targets(lent, texts.temperature, lessons)

    @functools.partial(jax.checkpoint, static_argnums=2)
    def depth(params: Params, hidden: Array, j: int) -> tuple[Array, Array]:
        pair = shifted(log_p, j), log_draft(arch, params, lent, texts.temperature, hidden)
        return (jax.vmap(loss.term, in_axes=1)(*pair),
                jax.lax.stop_gradient(jax.vmap(acceptance, in_axes=1)(*pair)))

    hidden = drafts(arch, options.unroll, window, params, lent, texts, lessons)
    terms, alpha = (jnp.stack(x) for x in zip(*(
        depth(params, h, j) for j, h in enumerate(hidden)), strict=True))
    values = jax.vmap(loss.combine, (1, 1, None, None))(terms, mask, count, options.depth_decay)
    accepted = jnp.where(mask, alpha, 0)
    return (weight * values).sum(), {"alpha": accepted.sum((1, 2)),
                                     "chain": jnp.cumprod(accepted, 0).sum()}


def make_optimizer(options: DistillOptions) -> optax.GradientTransformation:
    """AdamW behind clipping by global norm; linear warm-up, then constant or a linear decay."""
    rate, warm = options.learning_rate, options.warmup_steps
    parts = [optax.linear_schedule(rate / (warm + 1), rate, warm)]
    parts += [optax.linear_schedule(rate, 0.0, options.decay_steps - warm)
              if options.decay_steps else optax.constant_schedule(rate)]
    return optax.chain(
        optax.clip_by_global_norm(options.max_grad_norm),
        optax.adamw(optax.join_schedules(parts, [warm]), b1=options.b1, b2=options.b2,
                    weight_decay=options.weight_decay))


def begin(options: DistillOptions, params: Params) -> DistillState:
    """The state before the first update."""
    return DistillState(params, make_optimizer(options).init(params))


def update(arch: EagleArch, options: DistillOptions, state: DistillState, lent: Lent, texts: Texts,
           lessons: Lessons) -> tuple[DistillState, dict[str, Array]]:
    """One optimiser step over n micro-batches, whose split changes nothing.

    A loss or gradient that is not finite leaves the state as it was.

    Returns:
      The new state, and metrics: loss, grad_norm, applied (0 or 1), tokens (response tokens), and
      accept_length (expected tokens of a round with a chain of depth J, rejection sampling), all
      f32[]; alpha f32[J], the acceptance rate of each depth given that it is reached.
    """
    window = lessons.hidden.shape[3]
    masks = jax.vmap(live, (0, 0, None, None))(texts.length, texts.first, window, options.unroll)
    count = jnp.maximum(masks.sum((0, 2, 3), dtype=jnp.float32), 1.0)
    weight = LOSSES[options.loss].weigh(texts.reward, texts.advantage, texts.length > 0)
    grad = jax.value_and_grad(
        lambda params, *at: micro_loss(arch, options, params, lent, count, *at), has_aux=True)

    def accumulate(total: Any, at: tuple[Texts, Lessons, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad(state.params, *at)), None

    micro = (texts, lessons, weight)
    shapes = jax.eval_shape(grad, state.params, *jax.tree.map(lambda a: a[0], micro))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    ((value, metrics), grads), _ = jax.lax.scan(accumulate, zeros, micro)
    old = learner.LearnerState(state.params, state.optimizer)
    new, applied, norm = learner.apply(make_optimizer(options), old, grads, value)
    return DistillState(new.params, new.optimizer), {
        "loss": value, "grad_norm": norm, "applied": applied, "tokens": count[0],
        "accept_length": 1.0 + metrics["chain"] / count[0], "alpha": metrics["alpha"] / count}


@struct.dataclass
class Assessment:
    """How a drafter did on a micro-batch, at the anchors of `live`."""

    alpha: Array  # f32[J, b, T] acceptance rate
    agree: Array  # bool[J, b, T] drafter and actor find the same token most likely
    match: Array  # bool[J, b, T] the draft with the actor's noise is the token that was said
    live: Array  # bool[J, b, T]


def assess(arch: EagleArch, steps: int, params: Params, lent: Lent, texts: Texts, lessons: Lessons,
           key: Array, scale: Array) -> Assessment:
    """A drafter's drafts of a micro-batch, each depth given that those before it were right.

    Args:
      key, scale: see `noise`.
    """
    window = lessons.hidden.shape[2]
    log_p, drawn = targets(lent, texts.temperature, lessons), noise(lent.vocab, window, key, scale)
    said = _window(texts.tokens[None], texts.first, window)[0]
    found = []
    for j, hidden in enumerate(drafts(arch, steps, window, params, lent, texts, lessons)):
        log_q = log_draft(arch, params, lent, texts.temperature, hidden)
        found.append((jax.vmap(acceptance, in_axes=1)(shifted(log_p, j), log_q),
                      lent.vocab[log_q.argmax(0)] == shifted(lessons.best, j),
                      lent.vocab[(log_q + shifted(drawn, j)).argmax(0)] == shifted(said, j)))
    return Assessment(*(jnp.stack(x) for x in zip(*found, strict=True)),
                      live=live(texts.length, texts.first, window, steps))


def noise(vocab: Array, window: int, key: Array, scale: Array) -> Array:
    """The noise that response tokens were drawn with, f32[Vd, b, T], see prng.row_keys.

    Args:
      key: u32[b, 2].
      scale: f32[b], 0 for rows that were drawn greedily, else 1.
    """
    place = jnp.broadcast_to(jnp.arange(window)[None], (len(scale), window))
    drawn = gumbel(key[:, None], place, vocab) * scale[:, None, None]
    return jnp.moveaxis(drawn, -1, 0)
