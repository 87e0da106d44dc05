"""The policy update as one compiled program, the same whatever the drafter does.

A step's sequences lie in micro-batches [n, b, ...] in canonical order. Gradients are summed over them
with weights whose denominators are those of the whole batch, so the split changes nothing.
"""

import functools
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
from specrl_jax.rl import policy_loss
from specrl_jax.structs import Array, Rollout


@struct.dataclass
class LearnerState:
    """What an update reads and writes."""

    params: Params  # float32 master weights
    optimizer: Any


@struct.dataclass
class Batch:
    """Sequences to learn from, in micro-batches."""

    tokens: Array  # i32[n, b, P+T] prompt and response, right-padded
    prompt_length: Array  # i32[n, b]
    length: Array  # i32[n, b] response tokens; 0 pads
    advantage: Array  # f32[n, b]
    temperature: Array  # f32[n, b]
    rollout_logprob: Array  # f32[n, b, T] of verification, with temperature, untruncated


@struct.dataclass
class Totals:
    """Denominators of the whole batch, and how many micro-batches are worth running."""

    tokens: Array  # f32[]
    sequences: Array  # f32[]
    micro_batches: Array  # i32[]


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """AdamW behind clipping by global norm; linear warm-up, then constant, so `steps` may change."""
    schedule = optax.linear_schedule(
        config.learning_rate / (config.warmup_steps + 1), config.learning_rate,
        config.warmup_steps)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay))


def make_batch(rollout: Rollout, advantage: np.ndarray, temperature: float, micro_batch: int,
               keep_all: bool) -> tuple[Batch, Totals]:
    """Host arrays of a batch. Sequences whose advantage is 0 give no gradient and go last.

    Args:
      advantage: f32[Q].
      micro_batch: b.
      keep_all: run them too, because a KL term or a second update reads them.
    """
    order = np.argsort(advantage == 0, kind="stable")
    used = len(order) if keep_all else max(int((advantage != 0).sum()), 1)
    rows = -(-len(order) // micro_batch) * micro_batch
    sequences = {
        "tokens": _joined(rollout), "prompt_length": rollout.prompt_length,
        "length": rollout.length, "advantage": advantage.astype(np.float32),
        "temperature": np.full(len(order), temperature or 1.0, np.float32),
        "rollout_logprob": rollout.raw_logprob}

    def split(a: np.ndarray) -> np.ndarray:
        padded = np.zeros((rows, *a.shape[1:]), a.dtype)
        padded[: len(order)] = a[order]
        return padded.reshape(-1, micro_batch, *a.shape[1:])

    batch = Batch(**{name: split(np.asarray(a)) for name, a in sequences.items()})
    return batch, Totals(tokens=np.float32(rollout.length.sum()),
                         sequences=np.float32((rollout.length > 0).sum()),
                         micro_batches=np.int32(-(-used // micro_batch)))


def _joined(rollout: Rollout) -> np.ndarray:
    """i32[Q, P+T]: each prompt with its response right behind it."""
    prompts, width = rollout.prompt.shape
    joined = np.zeros((prompts, width + rollout.tokens.shape[1]), np.int32)
    for i in range(prompts):
        p, t = rollout.prompt_length[i], rollout.length[i]
        joined[i, :p] = rollout.prompt[i, :p]
        joined[i, p : p + t] = rollout.tokens[i, :t]
    return joined


def response_logprobs(arch: Architecture, params: Params, tokens: Array, prompt_length: Array,
                      length: Array, temperature: Array, response: int, remat: bool = False
                      ) -> Array:
    """Log-probability of each response token, f32[b, T], with temperature and without truncation.

    Args:
      tokens: i32[b, P+T].
      prompt_length, length: i32[b].
      temperature: f32[b], positive.
      response: T.
    """
    hidden, _ = transformer.hidden_states(arch, params, tokens, prompt_length + length, remat)
    place = prompt_length[:, None] - 1 + jnp.arange(response)[None]  # [b, T]
    last = tokens.shape[1] - 1
    picked = jnp.take_along_axis(hidden, jnp.minimum(place, last)[None], axis=2)
    scores = transformer.logits(arch, params, picked) / temperature[None, :, None]  # [V, b, T]
    said = jnp.take_along_axis(tokens, jnp.minimum(place + 1, last), axis=1)
    score = jnp.take_along_axis(scores, said[None], axis=0)[0]
    return score - jax.nn.logsumexp(scores, axis=0)


def score(arch: Architecture, remat: bool, params: Params, batch: Batch) -> Array:
    """Log-probabilities of a whole batch, f32[n, b, T], without gradients."""
    one = functools.partial(response_logprobs, arch, params,
                            response=batch.rollout_logprob.shape[2], remat=remat)
    return jax.lax.map(lambda m: one(*m), (batch.tokens, batch.prompt_length, batch.length,
                                           batch.temperature))


def update(arch: Architecture, config: LearnerConfig, max_new_tokens: int, state: LearnerState,
           batch: Batch, totals: Totals, old: Array | None, reference: Array | None
           ) -> tuple[LearnerState, dict[str, Array]]:
    """One optimiser step. A non-finite loss or gradient leaves the state as it was.

    Args:
      old: f32[n, b, T] log-probabilities under the policy that acted; None: those of `state`, which
        makes every ratio 1.
      reference: f32[n, b, T] log-probabilities under the initial policy, or None without a KL term.

    Returns:
      The new state, and metrics f32[]: loss, grad_norm, applied (0 or 1), clip_fraction,
      update_kl, reference_kl where there is one, logprob_gap (mean absolute difference of the
      rollout's and the learner's log-probabilities) and logprob_gap_max.
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
    seen = jnp.maximum(metrics.pop("seen"), 1.0)
    highest = metrics.pop("logprob_gap_max")
    metrics = {name: m / seen for name, m in metrics.items()}
    new, applied, norm = apply(make_optimizer(config), state, grads, value)
    return new, metrics | {"loss": value, "grad_norm": norm, "applied": applied,
                           "logprob_gap_max": highest}


def apply(optimizer: optax.GradientTransformation, state: LearnerState, grads: Params, loss: Array
          ) -> tuple[LearnerState, Array, Array]:
    """The optimiser's step unless something is not finite: (state, applied f32[], norm f32[])."""
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)

    def step(_: None) -> LearnerState:
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        return LearnerState(optax.apply_updates(state.params, updates), optimizer_state)

    return (jax.lax.cond(finite, step, lambda _: state, None), finite.astype(jnp.float32), norm)


def micro_loss(arch: Architecture, config: LearnerConfig, max_new_tokens: int, totals: Totals,
               params: Params, batch: Batch, old: Array | None, reference: Array | None
               ) -> tuple[Array, dict[str, Array]]:
    """A micro-batch's share of the loss f32[], and sums of its metrics over tokens."""
    response = batch.rollout_logprob.shape[1]
    logprob = response_logprobs(arch, params, batch.tokens, batch.prompt_length, batch.length,
                                batch.temperature, response, config.remat)
    mask = jnp.arange(response)[None] < batch.length[:, None]

    def one(logprob: Array, mask: Array, advantage: Array, old: Array, reference: Array | None
            ) -> tuple[Array, dict[str, Array]]:
        terms, metrics = policy_loss.sequence_terms(
            logprob=logprob, old_logprob=old, reference=reference, advantage=advantage, mask=mask,
            clip_low=config.clip_low, clip_high=config.clip_high, kl=config.kl)
        weights = policy_loss.token_weights(
            mask=mask, normalize=config.normalize, total_tokens=totals.tokens,
            total_sequences=totals.sequences, max_new_tokens=max_new_tokens)
        return (weights * terms).sum(), metrics

    acted = jax.lax.stop_gradient(logprob) if old is None else old
    values, metrics = jax.vmap(one)(logprob, mask, batch.advantage, acted, reference)
    gap = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logprob) - batch.rollout_logprob), 0)
    sums = {name: m.sum() for name, m in metrics.items()}
    return values.sum(), sums | {"logprob_gap": gap.sum(), "logprob_gap_max": gap.max(),
                                 "seen": mask.sum(dtype=jnp.float32)}
