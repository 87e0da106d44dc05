"""An RL algorithm of one's own: an advantage, a policy loss and a correction."""

import jax.numpy as jnp
import numpy as np

from specrl_jax.structs import Array


def best_of_group(rewards: np.ndarray) -> np.ndarray:
    """Returns f32[groups, M]: 1 for a group's best samples, 0 for others, minus the mean."""
    best = (rewards == rewards.max(1, keepdims=True)).astype(np.float32)
    return best - best.mean(1, keepdims=True)


def reinforce(*, logprob: Array, old_logprob: Array, advantage: Array,
              clip_low: float | Array, clip_high: float | Array) -> Array:
    """Returns -A log p of each token, f32[T] (REINFORCE, Williams 1992)."""
    return -advantage * logprob


def within_factor_2(*, old_logprob: Array, rollout_logprob: Array) -> Array:
    """Returns 0 for tokens whose two probabilities differ by more than a factor of 2, else 1."""
    return (jnp.abs(old_logprob - rollout_logprob) < jnp.log(2.0)).astype(jnp.float32)
