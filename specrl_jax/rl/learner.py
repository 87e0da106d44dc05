"""The policy update: one compiled program that does not depend on speculation.

A step's sequences lie in micro-batches [n, b, ...] in canonical order. Gradients are summed over
micro-batches with weights whose denominators are those of the whole batch, so that the size of a
micro-batch changes nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from specrl_jax.config import Config, LearnerConfig
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.transformer import Params
from specrl_jax.rl import algorithm, losses
from specrl_jax.rl.scores import token_scores
from specrl_jax.structs import Array, PyTree, Rollout


class LearnerState(struct.PyTreeNode):
    """What an update replaces."""

    params: Params  # float32 master weights
    optimizer: optax.OptState


class Batch(struct.PyTreeNode):
    """Sequences to learn from: n micro-batches of b rows, each row k sequences of one prompt.

    With k = 1 a row is a prompt and its response. With k = M a group shares one copy of its prompt,
    which pays if responses are short (segments: see transformer.segment_attend).
    """

    tokens: Array  # i32[n, b, P+kT]
    position: Array  # i32[n, b, P+kT]
    segment: Array  # i32[n, b, P+kT]
    predicted_at: Array  # i32[n, b, k, T] column whose output predicts each response token
    response: Array  # i32[n, b, k, T] response tokens
    length: Array  # i32[n, b, k] response tokens; 0 pads
    advantage: Array  # f32[n, b, k]
    temperature: Array  # f32[n, b, k] positive
    rollout_logprob: Array  # f32[n, b, k, T] of verification, with temperature, untruncated


class Totals(struct.PyTreeNode):
    """Denominators of the whole batch, and the number of micro-batches to run."""

    tokens: Array  # f32[]
    sequences: Array  # f32[]
    micro_batches: Array  # i32[]


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """Returns AdamW behind clipping by global norm; the rate is constant after a linear warm-up. It
    does not depend on `steps`, so that a run can be extended."""
    schedule = optax.linear_schedule(
        config.learning_rate / (config.warmup_steps + 1), config.learning_rate,
        config.warmup_steps)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay))


def make_batch(rollout: Rollout, advantage: np.ndarray, temperature: float, rows: int,
               sequences_per_row: int, keep_all: bool) -> tuple[Batch, Totals]:
    """Returns the host arrays of a batch. Rows whose advantages are all 0 have no gradient: last.

    Args:
      advantage: f32[Q].
      rows: b, rows of a micro-batch.
      sequences_per_row: k, a divisor of the group's size.
      keep_all: run rows without advantage too, because a KL term or a second update reads them.
    """
    by_row = (-1, sequences_per_row)
    layout = _layout(rollout, sequences_per_row) | {
        "response": rollout.tokens.reshape(*by_row, rollout.tokens.shape[1]),
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

    fields: dict[str, Any] = {name: split(np.asarray(a)) for name, a in layout.items()}
    fields["temperature"] = np.where(fields["temperature"] > 0, fields["temperature"], 1)
    totals: dict[str, Any] = {
        "tokens": np.float32(rollout.length.sum()),
        "sequences": np.float32((rollout.length > 0).sum()),
        "micro_batches": np.int32(-(-used // rows))}
    return Batch(**fields), Totals(**totals)


def _layout(rollout: Rollout, sequences_per_row: int) -> dict[str, np.ndarray]:
    """Returns tokens, position, segment i32[Q/k, P+kT] and predicted_at i32[Q/k, k, T]."""
    k = sequences_per_row
    total, width = rollout.prompt.shape
    buffer, rows = rollout.tokens.shape[1], total // k
    prompt_length = rollout.prompt_length[::k, None]  # [Q/k, 1]
    column = np.arange(width)[None]
    index = np.arange(buffer)[None, None]  # in the response
    live = index < rollout.length.reshape(rows, k, 1)
    number = np.arange(k)[None, :, None]  # of the sequence in its row
    position = np.broadcast_to(prompt_length[..., None] + index, live.shape)
    parts = {
        "tokens": (rollout.prompt[::k], rollout.tokens),
        "position": (np.broadcast_to(column, (rows, width)), position),
        "segment": (np.where(column < prompt_length, 0, -1), np.where(live, number + 1, -1))}
    joined = {name: np.concatenate([prompt, rest.reshape(rows, -1)], 1).astype(np.int32)
              for name, (prompt, rest) in parts.items()}
    before = width + number * buffer + index - 1
    predicted_at = np.where(index == 0, prompt_length[..., None] - 1, before)
    return joined | {"predicted_at": np.broadcast_to(predicted_at, live.shape).astype(np.int32)}


def response_scores(arch: Architecture, params: Params, batch: Batch, remat: bool
                    ) -> tuple[Array, Array]:
    """Returns log-probability and entropy, f32[b, k, T] each, of the response tokens of one
    micro-batch with fields [b, ...], at its temperature and without truncation."""
    hidden, _, _ = transformer.hidden_states(
        arch, params, batch.tokens, batch.position, batch.segment, remat)
    shape = batch.predicted_at.shape
    picked = jnp.take_along_axis(hidden, batch.predicted_at.reshape(1, shape[0], -1), axis=2)
    temperature = jnp.broadcast_to(batch.temperature[..., None], shape)
    found = token_scores(
        transformer.head(arch, params), picked.reshape(len(picked), -1), batch.response.reshape(-1),
        temperature.reshape(-1), jnp.int32(batch.response.size))
    return found[0].reshape(shape), found[1].reshape(shape)


def score(arch: Architecture, remat: bool, params: Params, batch: Batch) -> Array:
    """Returns the log-probabilities of a whole batch, f32[n, b, k, T], without gradients."""
    return jax.lax.map(lambda micro: response_scores(arch, params, micro, remat)[0], batch)


def update(arch: Architecture, config: Config, state: LearnerState, batch: Batch, totals: Totals,
           old: Array | None, reference: tuple[Array, Array] | None
           ) -> tuple[LearnerState, dict[str, Array]]:
    """Runs one optimiser step; a non-finite loss or gradient leaves the state as it was.

    Args:
      old: f32[n, b, k, T] log-probabilities under the policy that acted; None: those of `state`,
        which makes every ratio 1.
      reference: f32[n, b, k, T] log-probabilities by `score` under the initial policy and under
        that of `state`; None: no KL term. One program scores both, so that KL and gradient are 0
        where their weights are equal: Adam would scale up what two programs differ by.

    Returns:
      The new state, and metrics f32[]: loss, grad_norm, applied (0 or 1), and means over tokens of
      the metrics of `micro_loss`. They cover the micro-batches that ran, at least one, which leave
      out rows without an advantage (see `make_batch`); logprob_gap_tokens is their token count.
    """

    def loss(params: Params, i: Array) -> tuple[Array, dict[str, Array]]:
        at = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, False),
                          (batch, old, reference))
        return micro_loss(arch, config, totals, params, *at)

    def accumulate(i: Array, carry: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.params, i)
        total_value, total_metrics, total_grads = carry
        highest = jnp.maximum(total_metrics["logprob_gap_max"], metrics["logprob_gap_max"])
        summed = jax.tree.map(jnp.add, total_metrics, metrics)
        return (total_value + value, summed | {"logprob_gap_max": highest},
                jax.tree.map(jnp.add, total_grads, grads))

    shapes = jax.eval_shape(loss, state.params, jnp.int32(0))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (*shapes, state.params))
    value, metrics, grads = jax.lax.fori_loop(0, totals.micro_batches, accumulate, zeros)
    new, applied, norm = apply(make_optimizer(config.learner), state, grads, value)
    return new, _means(metrics) | {"loss": value, "grad_norm": norm, "applied": applied}


def first_gap(arch: Architecture, remat: bool, params: Params, batch: Batch) -> dict[str, Array]:
    """Returns the gap's metrics f32[] over the first micro-batch, from one forward."""
    first = jax.tree.map(lambda a: a[0], batch)
    return _means(gap_sums(response_scores(arch, params, first, remat)[0], first))


def gap_sums(logprob: Array, batch: Batch) -> dict[str, Array]:
    """Returns sum, largest value and number (f32[] each) of the absolute differences of rollout's
    and learner's log-probabilities f32[b, k, T] of a micro-batch; no gradient flows."""
    mask = response_mask(batch)
    gap = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logprob) - batch.rollout_logprob), 0)
    return {"logprob_gap": gap.sum(), "logprob_gap_max": gap.max(),
            "logprob_gap_tokens": mask.sum(dtype=jnp.float32)}


def _means(sums: dict[str, Array]) -> dict[str, Array]:
    """Returns means over tokens from sums over tokens."""
    tokens = jnp.maximum(sums["logprob_gap_tokens"], 1.0)
    kept = {name: sums[name] for name in ("logprob_gap_max", "logprob_gap_tokens")}
    return {name: m / tokens for name, m in sums.items()} | kept


def response_mask(batch: Batch) -> Array:
    """Returns where a micro-batch has response tokens, bool[b, k, T]."""
    return jnp.arange(batch.response.shape[2])[None, None] < batch.length[..., None]


def apply(optimizer: optax.GradientTransformation, state: LearnerState, grads: Params, loss: Array
          ) -> tuple[LearnerState, Array, Array]:
    """Returns (state, applied f32[], norm f32[]); the state changes if loss and norm are finite."""
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)

    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    # Selected in place: a conditional would hold the old and the new state at once.
    new = jax.tree.map(lambda new, old: jnp.where(finite, new, old),
                       LearnerState(params, optimizer_state), state)
    return new, finite.astype(jnp.float32), norm


def micro_loss(arch: Architecture, config: Config, totals: Totals, params: Params, batch: Batch,
               old: Array | None, reference: tuple[Array, Array] | None
               ) -> tuple[Array, dict[str, Array]]:
    """Returns a micro-batch's share of the loss f32[], and sums over tokens of policy/entropy and
    the metrics of `losses.sequence_terms` and `gap_sums`."""
    rl = config.rl
    _, loss, correction = algorithm.resolve(rl)
    logprob, entropy = response_scores(arch, params, batch, config.learner.remat)
    mask = response_mask(batch)

    def sequence_loss(logprob: Array, mask: Array, advantage: Array, rollout_logprob: Array,
                      old: Array, reference: Array | None) -> tuple[Array, dict[str, Array]]:
        terms, metrics = losses.sequence_terms(
            loss=loss, correction=correction, logprob=logprob, old_logprob=old,
            rollout_logprob=rollout_logprob, reference=reference, advantage=advantage, mask=mask,
            clip_low=rl.clip_low, clip_high=rl.clip_high, kl=rl.kl)
        weights = losses.token_weights(
            mask=mask, normalize=rl.normalize, total_tokens=totals.tokens,
            total_sequences=totals.sequences, max_new_tokens=config.rollout.max_new_tokens)
        return (weights * terms).sum(), metrics

    here = jax.lax.stop_gradient(logprob)
    initial = None if reference is None else here + (reference[0] - reference[1])
    values, metrics = jax.vmap(jax.vmap(sequence_loss))(
        logprob, mask, batch.advantage, batch.rollout_logprob, here if old is None else old,
        initial)
    metrics["policy/entropy"] = jnp.where(mask, jax.lax.stop_gradient(entropy), 0.0)
    sums = {name: m.sum() for name, m in metrics.items()}
    return values.sum(), sums | gap_sums(logprob, batch)
