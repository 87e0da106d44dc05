"""Weights that correct for log-probabilities that rollout and learner compute differently.

A correction maps the learner's and the rollout's log-probabilities of the sampled tokens, f32[T]
each, under the same weights, to a factor of each token's policy loss, f32[T]. It sees no gradient.
"""

from collections.abc import Callable
from typing import Protocol

import jax.numpy as jnp

from specrl_jax.config import Registry
from specrl_jax.structs import Array

LIMIT = 2.0  # C of the paper's experiments


class Correction(Protocol):
    """Returns the weight of each token, f32[T]."""

    def __call__(self, *, old_logprob: Array, rollout_logprob: Array) -> Array: ...


CORRECTIONS: Registry[Correction] = Registry("rl.correction", Callable)


@CORRECTIONS.register("none")
def none(*, old_logprob: Array, rollout_logprob: Array) -> Array:
    """Returns ones: every token counts alike."""
    del rollout_logprob
    return jnp.ones_like(old_logprob)


@CORRECTIONS.register("truncated")
def truncated(*, old_logprob: Array, rollout_logprob: Array) -> Array:
    """Returns `min(exp(old_logprob - rollout_logprob), LIMIT)`.

    Truncated importance sampling: Ionides, 2008, for sequences of decisions as in IMPALA,
    arXiv:1802.01561, section 4.
    """
    return jnp.minimum(jnp.exp(old_logprob - rollout_logprob), LIMIT)
