"""An RL algorithm of one's own: an advantage, a policy loss and a correction."""

import jax.numpy as jnp
import numpy as np

from specrl_jax.structs import Array


def best_of_group(rewards: np.ndarray) -> np.ndarray:
    """Returns f32[groups, M]: 1 for a group's best samples, 0 for others, minus the mean."""
    best = (rewards == rewards.max(1, keepdims=True)).astype(np.float32)
    return best - best.mean(1, keepdims=True)


def positive_only(*, logprob: Array, old_logprob: Array, advantage: Array, mask: Array,
                  **bounds: float | Array) -> tuple[Array, Array]:
    """Returns -A log p of each token, f32[T], where A > 0; and which are left out, bool[T]."""
    left_out = jnp.broadcast_to(advantage < 0, mask.shape)
    return jnp.where(left_out, 0.0, -advantage * logprob), left_out


def within_factor_2(*, old_logprob: Array, rollout_logprob: Array, mask: Array
                    ) -> tuple[Array, Array]:
    """Returns 0 for tokens whose two probabilities differ by more than a factor of 2, else 1; and
    which are 0."""
    cut = jnp.abs(old_logprob - rollout_logprob) > jnp.log(2.0)
    return jnp.where(cut, 0.0, 1.0), cut
