"""Policy losses of one sequence, token by token; `vmap` them over sequences.

The loss of a batch is `sum(weights * terms)` over all of its tokens. `token_weights` takes its
denominators from the whole batch, so micro-batches of any size add up to the batch exactly.

Nothing is clamped: a non-finite ratio of an unmasked token makes the loss non-finite, and the
learner skips the update.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specrl_jax.config import Registry
from specrl_jax.rl.corrections import Correction
from specrl_jax.structs import Array

NORMALIZERS = ("token", "sequence", "constant")


class Loss(Protocol):
    """Returns the loss of each token of one sequence, f32[T]; keyword arguments only.

    Args:
      logprob, old_logprob: f32[T], of the policy that learns and of the one that sampled.
      advantage: f32[].
      clip_low, clip_high: distances from 1 at which the ratio may be clipped.
    """

    def __call__(self, *, logprob: Array, old_logprob: Array, advantage: Array,
                 clip_low: float | Array, clip_high: float | Array) -> Array: ...


LOSSES: Registry[Loss] = Registry("rl.loss", Callable)


@LOSSES.register("ppo_clip")
def clipped_surrogate(*, logprob: Array, old_logprob: Array, advantage: Array,
                      clip_low: float | Array, clip_high: float | Array) -> Array:
    """Returns the clipped surrogate loss of each token, f32[T]; see `Loss` for the arguments.

    `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(logprob - old_logprob)`: PPO,
    arXiv:1707.06347, equation 7; with one advantage a sequence, GRPO, arXiv:2402.03300, equation 3.
    `clip_high` > `clip_low` is DAPO's clip-higher, arXiv:2503.14476, section 3.1.

    Gradients flow through `logprob` only. A token that the clip leaves alone, r = 1 included, has
    the gradient of `-r A` in full, whatever the bounds.

    Raises:
      TypeError: an argument has the wrong rank, length or dtype.
    """
    clipped = clip_indicator(logprob=logprob, old_logprob=old_logprob, advantage=advantage,
                             clip_low=clip_low, clip_high=clip_high)
    advantage = jax.lax.stop_gradient(advantage)
    ratio = jnp.exp(logprob - jax.lax.stop_gradient(old_logprob))
    bound = jnp.where(advantage > 0, 1.0 + clip_high, 1.0 - clip_low).astype(jnp.float32)
    return -jnp.where(clipped, bound, ratio) * advantage


def clip_indicator(*, logprob: Array, old_logprob: Array, advantage: Array,
                   clip_low: float | Array, clip_high: float | Array) -> Array:
    """Returns where the clip binds and so stops the gradient, bool[T].

    PPO, arXiv:1707.06347, figure 1: the ratio lies above `1 + clip_high` and the advantage is
    positive, or it lies below `1 - clip_low` and the advantage is negative.

    Raises:
      TypeError: an argument has the wrong rank, length or dtype.
    """
    _check(1, logprob=logprob, old_logprob=old_logprob)
    _check(0, advantage=advantage)
    ratio = jnp.exp(jax.lax.stop_gradient(logprob - old_logprob))
    above = (advantage > 0) & (ratio > 1.0 + clip_high)
    below = (advantage < 0) & (ratio < 1.0 - clip_low)
    return above | below


def kl_k3(*, logprob: Array, reference: Array) -> Array:
    """Returns an estimate of KL(q || p) from each token, f32[T]; never negative.

    `p/q - 1 - log(p/q)`: Schulman's k3 (joschu.net/blog/kl-approx.html), DeepSeekMath,
    arXiv:2402.03300, equation 4. `logprob` f32[T] is of the policy that sampled, q; gradients flow
    through it only. `reference` f32[T] is of the other policy, p.

    Raises:
      TypeError: an argument has the wrong rank, length or dtype.
    """
    _check(1, logprob=logprob, reference=reference)
    log_ratio = jax.lax.stop_gradient(reference) - logprob
    return jnp.expm1(log_ratio) - log_ratio


def sequence_terms(*, loss: Loss, correction: Correction, logprob: Array, old_logprob: Array,
                   rollout_logprob: Array, reference: Array | None, advantage: Array, mask: Array,
                   clip_low: float | Array, clip_high: float | Array, kl: float | Array
                   ) -> tuple[Array, dict[str, Array]]:
    """Returns loss terms and metrics of each token of one sequence.

    GRPO, arXiv:2402.03300, equation 3: the policy loss, times the correction's weight, plus `kl`
    times k3 to the reference. Masked positions may hold anything, NaN included: their terms,
    metrics and gradients are 0.

    Args:
      rollout_logprob, reference: f32[T]; reference None leaves the KL out. See `Loss` for others.
      mask: bool[T], tokens that count.

    Returns:
      The loss terms, f32[T], for `token_weights`, and f32[T] metrics without gradients:
      `policy/clip_fraction` (0 or 1), `kl/update` (k3 of KL(old || new)) and `kl/reference`.

    Raises:
      TypeError: an argument has the wrong rank, length or dtype.
    """
    _check(1, jnp.bool_, mask=mask)
    logprob, old_logprob = _masked(mask, logprob), _masked(mask, old_logprob)
    ratio: dict[str, Any] = dict(logprob=logprob, old_logprob=old_logprob, advantage=advantage,
                                 clip_low=clip_low, clip_high=clip_high)
    weight = correction(old_logprob=jax.lax.stop_gradient(old_logprob),
                        rollout_logprob=_masked(mask, rollout_logprob))
    terms = loss(**ratio) * weight
    metrics = {
        "policy/clip_fraction": clip_indicator(**ratio).astype(jnp.float32),
        "kl/update": kl_k3(logprob=old_logprob, reference=logprob),
    }
    if reference is not None:
        metrics["kl/reference"] = kl_k3(logprob=logprob, reference=_masked(mask, reference))
        terms = terms + kl * metrics["kl/reference"]
    metrics = {name: jax.lax.stop_gradient(_masked(mask, m)) for name, m in metrics.items()}
    return _masked(mask, terms), metrics


def token_weights(*, mask: Array, normalize: str, total_tokens: float | Array,
                  total_sequences: float | Array, max_new_tokens: int) -> Array:
    """Returns the weight of each token of one sequence in the batch's loss, f32[T]; 0 where masked.

    - `token`: mean over the batch's tokens (DAPO, arXiv:2503.14476, section 3.3);
    - `sequence`: mean over the sequence's tokens, then over sequences (GRPO, arXiv:2402.03300,
      equation 3);
    - `constant`: sum over the sequence's tokens divided by `max_new_tokens`, then mean over
      sequences (Dr. GRPO, arXiv:2503.20783, section 3).

    Args:
      mask: bool[T], tokens that count.
      normalize: one of NORMALIZERS.
      total_tokens, total_sequences: tokens and non-empty sequences of the whole batch.
      max_new_tokens: the run's limit on response tokens; T may be smaller.

    Raises:
      TypeError: `mask` is not bool of rank 1.
      ValueError: an unknown `normalize`.
    """
    _check(1, jnp.bool_, mask=mask)
    if normalize not in NORMALIZERS:
        raise ValueError(f"normalize = {normalize!r}: choose one of {', '.join(NORMALIZERS)}")
    length = jnp.sum(mask, dtype=jnp.float32)
    total = {"token": total_tokens, "sequence": total_sequences * length,
             "constant": total_sequences * max_new_tokens}[normalize]
    return mask.astype(jnp.float32) / jnp.maximum(total, 1.0)


def _masked(mask: Array, values: Array) -> Array:
    if mask.shape != values.shape:
        raise TypeError(f"mask {list(mask.shape)} and values {list(values.shape)} differ in shape")
    return jnp.where(mask, values, 0.0)


def _check(rank: int, dtype: Any = jnp.float32, /, **arrays: Array) -> None:
    """Raises TypeError unless all arrays have this rank and dtype, and the same shape."""
    for name, array in arrays.items():
        if array.ndim != rank or array.dtype != dtype:
            raise TypeError(f"{name} must be {jnp.dtype(dtype)} of rank {rank}, got "
                            f"{array.dtype}{list(array.shape)}; vmap over batch axes")
    if len({array.shape for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise TypeError(f"lengths differ: {lengths}")
