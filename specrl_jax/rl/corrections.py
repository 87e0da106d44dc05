"""Weights that correct for log-probabilities that rollout and learner compute differently.

A correction maps the learner's and the rollout's log-probabilities of the sampled tokens, under the
same weights of the policy, to a factor of each token's policy loss. It sees no gradient.
"""

from collections.abc import Callable
from typing import Protocol

import jax.numpy as jnp

from specrl_jax.config import Registry
from specrl_jax.structs import Array

LIMIT = 2.0  # C of truncated importance sampling
LOW, HIGH = 0.5, 5.0  # alpha and beta of IcePop


class Correction(Protocol):
    """Returns the weight of each token, f32[T], and where it is cut, bool[T].

    Keyword arguments only: `old_logprob`, of the learner, and `rollout_logprob`, f32[T] each and 0
    where masked; `mask` bool[T], tokens that count.
    """

    def __call__(self, *, old_logprob: Array, rollout_logprob: Array, mask: Array
                 ) -> tuple[Array, Array]: ...


CORRECTIONS: Registry[Correction] = Registry("rl.correction", Callable)


@CORRECTIONS.register("none")
def none(*, old_logprob: Array, rollout_logprob: Array, mask: Array) -> tuple[Array, Array]:
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
