"""The policy update as one compiled program, the same whatever the drafter does.

A step's sequences lie in micro-batches [n, b, ...] in canonical order. Gradients are summed over
them with weights whose denominators are those of the whole batch, so the split changes nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from specrl_jax.config import LearnerConfig
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.transformer import Params
from specrl_jax.rl import losses
from specrl_jax.structs import Array, Rollout


@struct.dataclass
class LearnerState:
    """What an update reads and writes."""

    params: Params  # float32 master weights
    optimizer: Any


@struct.dataclass
class Batch:
    """Sequences to learn from: n micro-batches of b rows, each row k sequences of one prompt.

    With k = 1 a row is a prompt and its response; with k = M the group shares one copy of its
    prompt, which short responses repay (segments, see transformer.segment_attend).
    """

    tokens: Array  # i32[n, b, P+kT]
    position: Array  # i32[n, b, P+kT]
    segment: Array  # i32[n, b, P+kT]
    place: Array  # i32[n, b, k, T] where each response token is predicted
    said: Array  # i32[n, b, k, T] response tokens
    length: Array  # i32[n, b, k] response tokens; 0 pads
    advantage: Array  # f32[n, b, k]
    temperature: Array  # f32[n, b, k] positive
    rollout_logprob: Array  # f32[n, b, k, T] of verification, with temperature, untruncated


@struct.dataclass
class Totals:
    """Denominators of the whole batch, and how many micro-batches are worth running."""

    tokens: Array  # f32[]
    sequences: Array  # f32[]
    micro_batches: Array  # i32[]


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """AdamW behind clipping by global norm; linear warm-up, then constant: `steps` may change."""
    schedule = optax.linear_schedule(
        config.learning_rate / (config.warmup_steps + 1), config.learning_rate,
        config.warmup_steps)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay))


def make_batch(rollout: Rollout, advantage: np.ndarray, temperature: float, rows: int,
               together: int, keep_all: bool) -> tuple[Batch, Totals]:
    """Host arrays of a batch. Rows whose advantages are all 0 give no gradient and go last.

    Args:
      advantage: f32[Q].
      rows: b, rows of a micro-batch.
      together: k, sequences of a row; a divisor of the group's size.
      keep_all: run rows without advantage too, because a KL term or a second update reads them.
    """
    layout = _layout(rollout, together)
    by_row = (-1, together)
    layout |= {
        "said": rollout.tokens.reshape(*by_row, rollout.tokens.shape[1]),
        "length": rollout.length.reshape(by_row),
        "advantage": advantage.astype(np.float32).reshape(by_row),
        "temperature": np.full(advantage.shape, temperature or 1.0, np.float32).reshape(by_row),
        "rollout_logprob": rollout.raw_logprob.reshape(*by_row, rollout.tokens.shape[1])}
    idle = (layout["advantage"] == 0).all(1)
    order = np.argsort(idle, kind="stable")
    used = len(order) if keep_all else max(int((~idle).sum()), 1)
    padded = -(-len(order) // rows) * rows

    def split(a: np.ndarray) -> np.ndarray:
        out = np.zeros((padded, *a.shape[1:]), a.dtype)
        out[: len(order)] = a[order]
        return out.reshape(-1, rows, *a.shape[1:])

    batch = Batch(**{name: split(np.asarray(a)) for name, a in layout.items()})
    batch = batch.replace(temperature=np.where(batch.temperature > 0, batch.temperature, 1))
    return batch, Totals(tokens=np.float32(rollout.length.sum()),
                         sequences=np.float32((rollout.length > 0).sum()),
                         micro_batches=np.int32(-(-used // rows)))


def _layout(rollout: Rollout, together: int) -> dict[str, np.ndarray]:
    """tokens, position, segment i32[Q/k, P+kT] and place i32[Q/k, k, T] of rows of k sequences."""
    total, width = rollout.prompt.shape
    buffer, rows = rollout.tokens.shape[1], total // together
    asked = rollout.prompt_length[::together, None]  # [Q/k, 1]
    column = np.arange(width)[None]
    turn = np.arange(buffer)[None, None]
    live = turn < rollout.length.reshape(rows, together, 1)
    number = np.arange(together)[None, :, None]
    parts = {
        "tokens": (rollout.prompt[::together], rollout.tokens),
        "position": (np.broadcast_to(column, (rows, width)),
                     np.broadcast_to(asked[..., None] + turn, live.shape)),
        "segment": (np.where(column < asked, 0, -1), np.where(live, number + 1, -1))}
    joined = {name: np.concatenate([first, rest.reshape(rows, -1)], 1).astype(np.int32)
              for name, (first, rest) in parts.items()}
    before = width + number * buffer + turn - 1
    place = np.where(turn == 0, asked[..., None] - 1, before)
    return joined | {"place": np.broadcast_to(place, live.shape).astype(np.int32)}


def response_logprobs(arch: Architecture, params: Params, batch: Batch, remat: bool = False
                      ) -> Array:
    """Log-probability of each response token of one micro-batch, f32[b, k, T].

    With temperature and without truncation. `batch` has fields [b, ...].
    """
    hidden, _, _ = transformer.hidden_states(
        arch, params, batch.tokens, batch.position, batch.segment, remat)
    rows, together, buffer = batch.place.shape
    picked = jnp.take_along_axis(hidden, batch.place.reshape(1, rows, -1), axis=2)
    scores = transformer.logits(arch, params, picked).reshape(-1, rows, together, buffer)
    scores = scores / batch.temperature[None, :, :, None]  # [V, b, k, T]
    score = jnp.take_along_axis(scores, batch.said[None], axis=0)[0]
    return score - jax.nn.logsumexp(scores, axis=0)


def score(arch: Architecture, remat: bool, params: Params, batch: Batch) -> Array:
    """Log-probabilities of a whole batch, f32[n, b, k, T], without gradients."""
    return jax.lax.map(lambda micro: response_logprobs(arch, params, micro, remat), batch)


def update(arch: Architecture, config: LearnerConfig, max_new_tokens: int, state: LearnerState,
           batch: Batch, totals: Totals, old: Array | None, reference: Array | None
           ) -> tuple[LearnerState, dict[str, Array]]:
    """One optimiser step. A non-finite loss or gradient leaves the state as it was.

    Args:
      old: f32[n, b, k, T] log-probabilities under the policy that acted; None: those of `state`,
        which makes every ratio 1.
      reference: f32[n, b, k, T] log-probabilities under the initial policy; None: no KL term.

    Returns:
      The new state, and metrics f32[]: loss, grad_norm, applied (0 or 1), clip_fraction,
      update_kl, reference_kl where there is one, and those of `gap_sums`, the gap as a mean; all
      over the micro-batches that ran, at least one, which leave out rows without an advantage (see
      `make_batch`): logprob_gap_tokens says how many tokens that are.
    """

    def loss(params: Params, i: Array) -> tuple[Array, dict[str, Array]]:
        at = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, False),
                          (batch, old, reference))
        return micro_loss(arch, config, max_new_tokens, totals, params, *at)

    def accumulate(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.params, i)
        total_value, total_metrics, total_grads = carry
        highest = jnp.maximum(total_metrics["logprob_gap_max"], metrics["logprob_gap_max"])
        summed = jax.tree.map(jnp.add, total_metrics, metrics)
        return (total_value + value, summed | {"logprob_gap_max": highest},
                jax.tree.map(jnp.add, total_grads, grads))

    shapes = jax.eval_shape(loss, state.params, jnp.int32(0))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (*shapes, state.params))
    value, metrics, grads = jax.lax.fori_loop(0, totals.micro_batches, accumulate, zeros)
    new, applied, norm = apply(make_optimizer(config), state, grads, value)
    return new, _means(metrics) | {"loss": value, "grad_norm": norm, "applied": applied}


def first_gap(arch: Architecture, remat: bool, params: Params, batch: Batch) -> dict[str, Array]:
    """The gap's metrics f32[] as `update` gives them, over the first micro-batch: one forward."""
    first = jax.tree.map(lambda a: a[0], batch)
    return _means(gap_sums(response_logprobs(arch, params, first, remat), first))


def gap_sums(logprob: Array, batch: Batch) -> dict[str, Array]:
    """Absolute differences of the rollout's and the learner's log-probabilities.

    Args:
      logprob: f32[b, k, T] of the learner; no gradient flows.
      batch: one micro-batch, fields [b, ...].

    Returns:
      f32[]: logprob_gap, their sum; logprob_gap_max; logprob_gap_tokens, how many they are.
    """
    mask = _said(batch)
    gap = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logprob) - batch.rollout_logprob), 0)
    return {"logprob_gap": gap.sum(), "logprob_gap_max": gap.max(),
            "logprob_gap_tokens": mask.sum(dtype=jnp.float32)}


def _means(sums: dict[str, Array]) -> dict[str, Array]:
    """Means over tokens of what are sums over them."""
    tokens = jnp.maximum(sums["logprob_gap_tokens"], 1.0)
    kept = {name: sums[name] for name in ("logprob_gap_max", "logprob_gap_tokens")}
    return {name: m / tokens for name, m in sums.items()} | kept


def _said(batch: Batch) -> Array:
    """bool[b, k, T]: the response tokens of a micro-batch."""
    return jnp.arange(batch.said.shape[2])[None, None] < batch.length[..., None]


def apply(optimizer: optax.GradientTransformation, state: LearnerState, grads: Params, loss: Array
          ) -> tuple[LearnerState, Array, Array]:
    """The optimiser's step unless something is not finite: (state, applied f32[], norm f32[])."""
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)

    def step(_: None) -> LearnerState:
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        return LearnerState(optax.apply_updates(state.params, updates), optimizer_state)

    return (jax.lax.cond(finite, step, lambda _: state, None), finite.astype(jnp.float32), norm)


def micro_loss(arch: Architecture, config: LearnerConfig, max_new_tokens: int, totals: Totals,
               params: Params, batch: Batch, old: Array | None, reference: Array | None
               ) -> tuple[Array, dict[str, Array]]:
    """A micro-batch's share of the loss f32[], and sums of its metrics over tokens."""
    logprob = response_logprobs(arch, params, batch, config.remat)
    mask = _said(batch)

    def one(logprob: Array, mask: Array, advantage: Array, old: Array, reference: Array | None
            ) -> tuple[Array, dict[str, Array]]:
        terms, metrics = losses.sequence_terms(
            logprob=logprob, old_logprob=old, reference=reference, advantage=advantage, mask=mask,
            clip_low=config.clip_low, clip_high=config.clip_high, kl=config.kl)
        weights = losses.token_weights(
            mask=mask, normalize=config.normalize, total_tokens=totals.tokens,
            total_sequences=totals.sequences, max_new_tokens=max_new_tokens)
        return (weights * terms).sum(), metrics

    acted = jax.lax.stop_gradient(logprob) if old is None else old
    values, metrics = jax.vmap(jax.vmap(one))(logprob, mask, batch.advantage, acted, reference)
    sums = {name: m.sum() for name, m in metrics.items()}
    return values.sum(), sums | gap_sums(logprob, batch)
