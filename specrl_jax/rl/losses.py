"""Policy losses of one sequence, token by token; `vmap` them over sequences.

The loss of a batch is `sum(weights * terms)` over all of its tokens. `token_weights` takes its
denominators from the whole batch, so micro-batches of any size add up to the batch exactly.

Nothing is clamped: a non-finite ratio of an unmasked token makes the loss non-finite, and the
learner skips the update.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specrl_jax.config import Registry, RLConfig
from specrl_jax.structs import Array

LIMIT = 2.0  # C of truncated importance sampling
LOW, HIGH = 0.5, 5.0  # alpha and beta of IcePop


class SequenceLogprobs(NamedTuple):
    """Log-probabilities of the tokens of one sequence, f32[T] each, under several policies."""

    learner: Array  # the only one with a gradient
    old: Array  # the weights that sampled, computed by the learner
    rollout: Array  # the weights that sampled, computed by the rollout
    reference: Array | None = None  # the initial policy; None leaves the KL out


class Loss(Protocol):
    """Returns the loss of each token of one sequence, f32[T], and where its clip binds, bool[T].

    Keyword arguments only:

      logprob, old_logprob: f32[T], of the policy that learns and of the one that sampled; 0 where
        masked.
      advantage: f32[], or f32[T] where tokens differ (rl.teacher).
      mask: bool[T], tokens that count, for losses that read a whole sequence.
      clip_low, clip_high: distances from 1 at which the ratio may be clipped.
    """

    def __call__(self, *, logprob: Array, old_logprob: Array, advantage: Array, mask: Array,
                 clip_low: float | Array, clip_high: float | Array) -> tuple[Array, Array]: ...


LOSSES: Registry[Loss] = Registry("rl.loss", Callable)


@LOSSES.register("ppo_clip")
def ppo_clip(*, logprob: Array, old_logprob: Array, advantage: Array, mask: Array,
             clip_low: float | Array, clip_high: float | Array) -> tuple[Array, Array]:
    """Returns the clipped surrogate loss of each token; see `Loss`.

    `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(logprob - old_logprob)`: PPO,
    arXiv:1707.06347, equation 7; with one advantage a sequence, GRPO, arXiv:2402.03300, equation 3.
    `clip_high` > `clip_low` is DAPO's clip-higher, arXiv:2503.14476, section 3.1.

    Gradients flow through `logprob` only. An unclipped token, r = 1 included, has the full gradient
    of `-r A`, whatever the bounds.
    """
    del mask
    return _surrogate(jnp.exp(logprob - jax.lax.stop_gradient(old_logprob)), advantage,
                      clip_low, clip_high)


@LOSSES.register("gspo")
def gspo(*, logprob: Array, old_logprob: Array, advantage: Array, mask: Array,
         clip_low: float | Array, clip_high: float | Array) -> tuple[Array, Array]:
    """Returns the clipped surrogate loss of the sequence at each token; see `Loss`.

    Its ratio is `exp(mean(logprob - old_logprob))` over the sequence's tokens: GSPO,
    arXiv:2507.18071, equations 5 and 7. A token's gradient is that of its own log-probability
    times the ratio (the paper's GSPO-token), which is the same where all tokens have one
    advantage, and keeps a teacher's apart.
    """
    here = jax.lax.stop_gradient(logprob)
    total = jnp.sum(jnp.where(mask, here - jax.lax.stop_gradient(old_logprob), 0.0))
    ratio = jnp.exp(total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0))
    ratio *= jnp.exp(jnp.where(mask, logprob - here, 0.0))
    return _surrogate(ratio, advantage, clip_low, clip_high)


@LOSSES.register("cispo")
def cispo(*, logprob: Array, old_logprob: Array, advantage: Array, mask: Array,
          clip_low: float | Array, clip_high: float | Array) -> tuple[Array, Array]:
    """Returns `-clip(r, 1 - clip_low, 1 + clip_high) A logprob`; see `Loss`.

    No gradient flows through the clipped ratio, so that every token keeps one: CISPO,
    arXiv:2506.13585, equation 4, which has no lower bound (`clip_low` >= 1).
    """
    del mask
    ratio = jnp.exp(jax.lax.stop_gradient(logprob - old_logprob))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -weight * jax.lax.stop_gradient(advantage) * logprob, weight != ratio


@LOSSES.register("reinforce")
def reinforce(*, logprob: Array, old_logprob: Array, advantage: Array, mask: Array,
              clip_low: float | Array, clip_high: float | Array) -> tuple[Array, Array]:
    """Returns `-A logprob`, without a ratio; see `Loss`.

    REINFORCE, Williams 1992; with a baseline in the advantage RLOO, arXiv:2402.14740, and ReMax,
    arXiv:2310.10505. Bounds are not read.
    """
    del old_logprob, mask, clip_low, clip_high
    return -jax.lax.stop_gradient(advantage) * logprob, jnp.zeros(logprob.shape, bool)


def _surrogate(ratio: Array, advantage: Array, clip_low: float | Array, clip_high: float | Array
               ) -> tuple[Array, Array]:
    """Returns the clipped surrogate f32[T] of ratios f32[T], and where its clip binds."""
    advantage = jax.lax.stop_gradient(advantage)
    here = jax.lax.stop_gradient(ratio)
    above = (advantage > 0) & (here > 1.0 + clip_high)
    below = (advantage < 0) & (here < 1.0 - clip_low)
    bound = jnp.where(advantage > 0, 1.0 + clip_high, 1.0 - clip_low).astype(jnp.float32)
    clipped = above | below
    return -jnp.where(clipped, bound, ratio) * advantage, clipped


def kl_k1(*, logprob: Array, reference: Array) -> Array:
    """Returns `log(q/p)` of each token, f32[T]: Schulman's k1, unbiased, of any sign.

    Its gradient is that of `logprob`, whose mean is 0: no use in a loss. See `kl_k3`.
    """
    return logprob - jax.lax.stop_gradient(reference)


def kl_k2(*, logprob: Array, reference: Array) -> Array:
    """Returns `log(q/p)^2 / 2` of each token, f32[T]: Schulman's k2, whose gradient's mean is that
    of KL(q || p). See `kl_k3`."""
    return 0.5 * (logprob - jax.lax.stop_gradient(reference)) ** 2


def kl_k3(*, logprob: Array, reference: Array) -> Array:
    """Returns an estimate of KL(q || p) from each token, f32[T]; never negative.

    `p/q - 1 - log(p/q)`: Schulman's k3 (joschu.net/blog/kl-approx.html), DeepSeekMath,
    arXiv:2402.03300, equation 4. `logprob` f32[T] is of the policy that sampled, q; gradients flow
    through it only. `reference` f32[T] is of the other policy, p.
    """
    log_ratio = jax.lax.stop_gradient(reference) - logprob
    return jnp.expm1(log_ratio) - log_ratio


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}  # rl.kl_estimator


class Correction(Protocol):
    """Returns a factor of each token's loss, f32[T], and where it is cut, bool[T].

    It corrects for log-probabilities of the sampled tokens that rollout and learner compute
    differently under the same weights, and sees no gradient. Keyword arguments only:
    `old_logprob`, of the learner, and `rollout_logprob`, f32[T] each and 0 where masked; `mask`
    bool[T], tokens that count.
    """

    def __call__(self, *, old_logprob: Array, rollout_logprob: Array, mask: Array
                 ) -> tuple[Array, Array]: ...


CORRECTIONS: Registry[Correction] = Registry("rl.correction", Callable)


@CORRECTIONS.register("none")
def no_correction(*, old_logprob: Array, rollout_logprob: Array, mask: Array
                  ) -> tuple[Array, Array]:
    """Returns ones: every token counts alike."""
    del rollout_logprob
    return jnp.ones_like(old_logprob), jnp.zeros_like(mask)


@CORRECTIONS.register("truncated")
def truncated(*, old_logprob: Array, rollout_logprob: Array, mask: Array) -> tuple[Array, Array]:
    """Returns `min(exp(old_logprob - rollout_logprob), LIMIT)`.

    Truncated importance sampling: Ionides, 2008, for sequences of decisions as in IMPALA,
    arXiv:1802.01561, section 4.
    """
    del mask
    ratio = jnp.exp(old_logprob - rollout_logprob)
    return jnp.minimum(ratio, LIMIT), ratio > LIMIT


@CORRECTIONS.register("truncated_sequence")
def truncated_sequence(*, old_logprob: Array, rollout_logprob: Array, mask: Array
                       ) -> tuple[Array, Array]:
    """Returns `min(exp(sum(old_logprob - rollout_logprob)), LIMIT)`, one weight for all tokens.

    The sum is over the sequence: the truncated weight of the whole response (Ionides, 2008).
    """
    ratio = jnp.exp(jnp.sum(jnp.where(mask, old_logprob - rollout_logprob, 0.0)))
    weight = jnp.broadcast_to(jnp.minimum(ratio, LIMIT), mask.shape)
    return weight, jnp.broadcast_to(ratio > LIMIT, mask.shape)


@CORRECTIONS.register("masked")
def masked(*, old_logprob: Array, rollout_logprob: Array, mask: Array) -> tuple[Array, Array]:
    """Returns `exp(old_logprob - rollout_logprob)` from LOW to HIGH, and 0 outside.

    IcePop: masked on both sides, as in Ring-1T, arXiv:2510.18855.
    """
    del mask
    ratio = jnp.exp(old_logprob - rollout_logprob)
    cut = (ratio < LOW) | (ratio > HIGH)
    return jnp.where(cut, 0.0, ratio), cut


def sequence_terms(*, loss: Loss, correction: Correction, logprobs: SequenceLogprobs,
                   advantage: Array, mask: Array, rl: RLConfig
                   ) -> tuple[Array, dict[str, Array]]:
    """Returns loss terms and metrics of each token of one sequence.

    GRPO, arXiv:2402.03300, equation 3: the policy loss, times the correction's weight, plus `rl.kl`
    times an estimate of the KL to the reference. Masked positions may hold anything, NaN included:
    their terms, metrics and gradients are 0.

    Returns:
      The loss terms, f32[T], for `token_weights`, and f32[T] metrics without gradients:
      `policy/clip_fraction` and `policy/correction_fraction` (0 or 1), `policy/ratio_mean` (of the
      token, to the policy that sampled), the correction's `weight` and its square, `kl/update` (k3
      of KL(old || new)) and `kl/reference`.
    """
    logprob, old_logprob = _masked(mask, logprobs.learner), _masked(mask, logprobs.old)
    terms, clipped = loss(logprob=logprob, old_logprob=old_logprob, advantage=advantage, mask=mask,
                          clip_low=rl.clip_low, clip_high=rl.clip_high)
    weight, cut = correction(old_logprob=jax.lax.stop_gradient(old_logprob),
                             rollout_logprob=_masked(mask, logprobs.rollout), mask=mask)
    terms = terms * weight
    metrics = {
        "policy/clip_fraction": clipped.astype(jnp.float32),
        "policy/correction_fraction": cut.astype(jnp.float32),
        "policy/ratio_mean": jnp.exp(logprob - old_logprob),
        "weight": weight, "weight_square": weight**2,
        "kl/update": kl_k3(logprob=old_logprob, reference=logprob),
    }
    if logprobs.reference is not None:
        reference = _masked(mask, logprobs.reference)
        metrics["kl/reference"] = kl_k3(logprob=logprob, reference=reference)
        terms = terms + rl.kl * KL_ESTIMATORS[rl.kl_estimator](logprob=logprob,
                                                               reference=reference)
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

    The totals are those of the whole batch, without empty sequences.
    """
    length = jnp.sum(mask, dtype=jnp.float32)
    total = {"token": total_tokens, "sequence": total_sequences * length,
             "constant": total_sequences * max_new_tokens}[normalize]
    return mask.astype(jnp.float32) / jnp.maximum(total, 1.0)


def _masked(mask: Array, values: Array) -> Array:
    return jnp.where(mask, values, 0.0)
