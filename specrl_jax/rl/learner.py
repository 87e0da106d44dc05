"""The policy update: one compiled program that does not depend on speculation.

A batch is split into micro-batches [n, b, ...]. Gradients are summed over them with weights whose
denominators cover the whole batch, so neither the size of a micro-batch nor the packing of rows
changes the update. Losses see each sequence by token, [T], whatever the packing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from specrl_jax import sharding
from specrl_jax.config import Config, LearnerConfig
from specrl_jax.model import layers, lora, transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.transformer import Params
from specrl_jax.rl import algorithm, losses
from specrl_jax.rl.batch import Batch, Totals
from specrl_jax.rl.logprobs import row_logprobs
from specrl_jax.rl.losses import SequenceLogprobs
from specrl_jax.rl.optimizer import learning_rate, make_optimizer
from specrl_jax.structs import Array, PyTree

LARGEST = ("logprob_gap_max", "policy/ratio_max")  # metrics that are maxima, not means
TINY = 1e-30
GAPS = ("logprob_gap", "logprob_gap_max", "logprob_gap_tokens")  # under the weights that acted


class OtherPolicies(NamedTuple):
    """Log-probabilities f32[b, R] of a micro-batch under policies other than the learner's.

    See `update`; None leaves a policy out.
    """

    old: Array | None
    reference: tuple[Array, Array] | None
    teacher: Array | None


class LearnerState(struct.PyTreeNode):
    """What an update replaces."""

    params: Params  # float32 master weights, or adapters (model/lora.py)
    optimizer: optax.OptState


def response_logprobs(arch: Architecture, config: Config, params: Params, batch: Batch
                      ) -> tuple[Array, Array]:
    """Returns log-probability and entropy, f32[b, R] each, of the response tokens of one
    micro-batch with fields [b, ...], at its temperature and without truncation.

    Layers and head run in model.dtype, as in the rollout.
    """
    hidden, _, _ = transformer.hidden_states(
        arch, transformer.in_dtype(params, config.model.dtype), batch.tokens, batch.position,
        batch.segment, batch.prefix, config.learner.remat)
    picked = jnp.take_along_axis(hidden, batch.predicted_at[None], axis=2)
    return row_logprobs(transformer.head(arch, params), picked, batch.response, batch.temperature,
                        batch.length.sum(1))


def by_sequence(values: Array, batch: Batch, buffer: int) -> Array:
    """Returns the values [b, R] of response tokens by sequence, [b, K, T] with T = `buffer`."""
    padded = jnp.pad(values, ((0, 0), (0, buffer)))
    one = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, buffer), (None, 0))
    return jax.vmap(one)(padded, batch.start)


def compute_logprobs(arch: Architecture, config: Config, params: Params, batch: Batch,
                     totals: Totals, base: Params | None = None) -> Array:
    """Returns the log-probabilities of a whole batch, f32[n, b, R], without gradients; for `base`
    see `lora.attach`."""
    params = lora.attach(config.learner, base, params)

    def one(i: Array, logprobs: Array) -> Array:
        part = response_logprobs(arch, config, params, _micro_batch(batch, i))[0]
        return jax.lax.dynamic_update_index_in_dim(logprobs, part, i, 0)

    return jax.lax.fori_loop(0, totals.micro_batches, one, jnp.zeros_like(batch.rollout_logprob))


def sequence_kl(config: Config, batch: Batch, logprob: Array, reference: Array) -> Array:
    """Returns an estimate of the KL to the reference of each sequence, f32[n, b, K], summed over
    its tokens, from log-probabilities f32[n, b, R] by `compute_logprobs`."""
    buffer, estimate = config.rollout.max_new_tokens, losses.KL_ESTIMATORS[config.rl.kl_estimator]

    def one(batch: Batch, logprob: Array, reference: Array) -> Array:
        mask = jnp.arange(buffer)[None, None] < batch.length[..., None]
        values = jax.vmap(lambda a, b: estimate(logprob=a, reference=b))(logprob, reference)
        return jnp.where(mask, by_sequence(values, batch, buffer), 0).sum(-1)

    return jax.vmap(one)(batch, logprob, reference)


def _micro_batch(batch: PyTree, i: Array) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, False), batch)


def update(arch: Architecture, config: Config, state: LearnerState, batch: Batch, totals: Totals,
           old: Array | None, reference: tuple[Array, Array] | None, base: Params | None = None,
           teacher: Array | None = None) -> tuple[LearnerState, dict[str, Array]]:
    """Runs one optimiser step; a non-finite loss or gradient leaves the state as it was.

    Args:
      old: f32[n, b, R] log-probabilities under the policy that acted; None: those of `state`,
        which makes every ratio 1.
      reference: f32[n, b, R] log-probabilities by `compute_logprobs` under the initial policy and
        under that of `state`; None: no KL term. One program computes both, so that KL and gradient
        are 0 where their weights are equal: Adam would scale up what two programs differ by.
      base: see `lora.attach`; they have no gradient.
      teacher: f32[n, b, R] log-probabilities under the teacher, see `micro_loss`; None: no teacher.

    Returns:
      The new state, and metrics f32[]: loss, grad_norm, applied (0 or 1), learning_rate, and means
      over tokens of the metrics of `micro_loss`. They cover the micro-batches that ran, at least
      one, which leave out rows without an advantage (see `make_batch`); logprob_gap_tokens
      counts those of their tokens that the policy to update drew.
    """
    others = OtherPolicies(old, reference, teacher)

    def loss(params: Params, i: Array) -> tuple[Array, dict[str, Array]]:
        return micro_loss(arch, config, totals, lora.attach(config.learner, base, params),
                          *_micro_batch((batch, others), i))

    def accumulate(i: Array, carry: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.params, i)
        total_value, total_metrics, total_grads = carry
        metrics = {name: (jnp.maximum if name in LARGEST else jnp.add)(total_metrics[name], m)
                   for name, m in metrics.items()}
        return (total_value + value, metrics,
                jax.tree.map(jnp.add, total_grads, split_like_moments(arch, config.learner, grads)))

    shapes = jax.eval_shape(loss, state.params, jnp.int32(0))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (*shapes, state.params))
    zeros = *zeros[:2], split_like_moments(arch, config.learner, zeros[2])
    value, metrics, grads = jax.lax.fori_loop(0, totals.micro_batches, accumulate, zeros)
    rate = learning_rate(config.learner, state.optimizer)
    if config.learner.optimizer_offload:
        state = state.replace(optimizer=jax.device_put(state.optimizer, jax.memory.Space.Device))
    new, applied, norm = apply(make_optimizer(config.learner), state, grads, value)
    return new, _means(metrics) | {"loss": value, "grad_norm": norm, "applied": applied,
                                   "learning_rate": rate}


def split_like_moments(arch: Architecture, options: LearnerConfig, tree: Params) -> Params:
    """Returns a tree like the parameters, split over devices as the optimiser's moments are."""
    described = lora.trained(arch, options, layers.is_stacked(tree))
    return sharding.constrain(tree, described, sharding.MOMENT_RULES)


def first_gap(arch: Architecture, config: Config, params: Params, batch: Batch,
              base: Params | None = None) -> dict[str, Array]:
    """Returns the gap's metrics f32[] over the first micro-batch, from one forward."""
    first, params = _micro_batch(batch, jnp.int32(0)), lora.attach(config.learner, base, params)
    return _means(gap_sums(response_logprobs(arch, config, params, first)[0], first))


def gap_sums(logprob: Array, batch: Batch) -> dict[str, Array]:
    """Returns sum, largest value and number (f32[] each) of the absolute differences of rollout's
    and learner's log-probabilities f32[b, R] of a micro-batch, where one policy has both, and the
    number of all tokens; no gradient flows."""
    mask = jnp.arange(logprob.shape[1])[None] < batch.length.sum(1)[:, None]
    same = mask & (batch.version == 0)
    gap = jnp.where(same, jnp.abs(jax.lax.stop_gradient(logprob) - batch.rollout_logprob), 0)
    return {"logprob_gap": gap.sum(), "logprob_gap_max": gap.max(),
            "logprob_gap_tokens": same.sum(dtype=jnp.float32),
            "tokens": mask.sum(dtype=jnp.float32)}


def over_steps(steps: Sequence[Mapping[str, float]], last: int) -> dict[str, float]:
    """Returns the metrics of an update's optimiser steps: means, and maxima of LARGEST, over its
    `last` ones; `applied` 0 if any was skipped; GAPS of the first, which alone sees the weights
    that acted."""
    means = {name: float((np.max if name in LARGEST else np.mean)(
        [step[name] for step in steps[-last:]])) for name in steps[0]}
    return means | {name: steps[0][name] for name in GAPS} | {
        "applied": min(step["applied"] for step in steps)}


def _means(sums: dict[str, Array]) -> dict[str, Array]:
    """Returns means over tokens from sums over tokens, and the effective sample size of the
    correction's weights, (sum w)^2 / (n sum w^2)."""
    sums, totals = dict(sums), (*LARGEST, "logprob_gap_tokens")
    tokens = jnp.maximum(sums.pop("tokens"), 1.0)
    of = {"logprob_gap": jnp.maximum(sums["logprob_gap_tokens"], 1.0)}
    if "weight" in sums:
        weight, square = sums.pop("weight"), sums.pop("weight_square")
        sums["policy/ess"] = weight**2 / jnp.maximum(square, TINY)
    return {name: m if name in totals else m / of.get(name, tokens) for name, m in sums.items()}


def apply(optimizer: optax.GradientTransformation, state: LearnerState, grads: Params, loss: Array
          ) -> tuple[LearnerState, Array, Array]:
    """Returns (state, applied f32[], norm f32[]); the state changes if loss and norm are finite."""
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)

    def step(_: None) -> LearnerState:
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return LearnerState(params, optimizer_state)

    return jax.lax.cond(finite, step, lambda _: state, None), finite.astype(jnp.float32), norm


def micro_loss(arch: Architecture, config: Config, totals: Totals, params: Params, batch: Batch,
               others: OtherPolicies) -> tuple[Array, dict[str, Array]]:
    """Returns a micro-batch's share of the loss f32[], and sums over tokens of policy/entropy and
    the metrics of `losses.sequence_terms` and `gap_sums`.

    A teacher adds `rl.teacher_weight (log p_teacher - log p_old)` to each token's advantage. Its
    mean is minus KL(policy || teacher) at that token: on-policy distillation as in GKD,
    arXiv:2306.13649, with the reverse KL and lambda 1.
    """
    rl, buffer = config.rl, config.rollout.max_new_tokens
    _, loss, correction = algorithm.resolve(rl)
    logprob, entropy = response_logprobs(arch, config, params, batch)
    here = jax.lax.stop_gradient(logprob)
    initial = None
    if others.reference is not None:
        initial = here + (others.reference[0] - others.reference[1])
    mask = jnp.arange(buffer)[None, None] < batch.length[..., None]
    old = here if others.old is None else others.old
    per_token = (SequenceLogprobs(logprob, old, batch.rollout_logprob, initial),
                 entropy if rl.entropy else jax.lax.stop_gradient(entropy),
                 None if others.teacher is None else others.teacher - old)

    def sequence_loss(mask: Array, advantage: Array, logprobs: SequenceLogprobs, entropy: Array,
                      above: Array | None) -> tuple[Array, dict[str, Array]]:
        if above is not None:
            advantage = advantage + rl.teacher_weight * above
        terms, metrics = losses.sequence_terms(
            loss=loss, correction=correction, logprobs=logprobs, advantage=advantage, mask=mask,
            rl=rl)
        entropy = jnp.where(mask, entropy, 0.0)
        if rl.entropy:
            terms = terms - rl.entropy * entropy
        weights = losses.token_weights(
            mask=mask, normalize=rl.normalize, total_tokens=totals.tokens,
            total_sequences=totals.sequences, max_new_tokens=buffer)
        metrics["policy/entropy"] = jax.lax.stop_gradient(entropy)
        if above is not None:
            metrics["kl/teacher"] = jnp.where(mask, -above, 0.0)
        return (weights * terms).sum(), metrics

    values, metrics = jax.vmap(jax.vmap(sequence_loss))(
        mask, batch.advantage,
        *jax.tree.map(lambda a: by_sequence(a, batch, buffer), per_token))
    sums = {name: m.sum() for name, m in metrics.items()}
    return values.sum(), sums | gap_sums(logprob, batch) | {
        "policy/ratio_max": metrics["policy/ratio_mean"].max()}
