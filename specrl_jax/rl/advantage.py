"""Advantages from the rewards of a prompt's samples. Host functions of numpy arrays.

They compute in float64 and return float32. The mean of M equal float32 rewards is exact in float64,
so a group whose rewards agree gets advantages of exactly zero, not rounding noise over `eps`.
"""

from collections.abc import Callable

import numpy as np

from specrl_jax.config import Registry

Advantage = Callable[..., np.ndarray]
"""rewards f32[groups, M] -> f32[groups, M]; `greedy_baseline` also takes a baseline."""
ADVANTAGES: Registry[Advantage] = Registry("rl.advantage", Callable)


@ADVANTAGES.register("group")
def group(rewards: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Returns `(reward - mean) / (std + eps)` within each group, f32[groups, M].

    GRPO: DeepSeekMath, arXiv:2402.03300, section 4.1.2. The paper writes std without saying which.
    This is the population's (divisor M): two samples that differ get -1 and 1, and every group's
    advantages have mean square 1. The sample's (divisor M - 1) would scale all of them by
    sqrt((M - 1) / M).

    Raises ValueError if a reward is not finite, as all advantages do.
    """
    centred = _centred(rewards)
    std = np.sqrt(np.mean(centred**2, axis=1, keepdims=True))
    return (centred / (std + eps)).astype(np.float32)


@ADVANTAGES.register("group_mean")
def group_mean(rewards: np.ndarray) -> np.ndarray:
    """Returns `reward - mean` within each group, f32[groups, M].

    Dr. GRPO: arXiv:2503.20783, section 3.
    """
    return _centred(rewards).astype(np.float32)


@ADVANTAGES.register("leave_one_out")
def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Returns each reward minus the mean of the group's other rewards, f32[groups, M].

    RLOO: Ahmadian et al., arXiv:2402.14740, section 2. `r_i - (sum - r_i) / (M - 1)` is computed as
    `(r_i - mean) M / (M - 1)`.
    """
    centred = _centred(rewards)
    size = rewards.shape[1]
    return (centred * (size / (size - 1))).astype(np.float32)


@ADVANTAGES.register("batch")
def batch(rewards: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Returns `(reward - mean) / (std + eps)`, both of all sequences of the step, f32[groups, M].

    REINFORCE++: arXiv:2501.03262, section 3.2, where the sum runs over tokens: here each sequence
    counts once, whatever its length.
    """
    exact = _checked(rewards)
    centred = exact - exact.mean()
    return (centred / (np.sqrt(np.mean(centred**2)) + eps)).astype(np.float32)


@ADVANTAGES.register("greedy_baseline")
def greedy_baseline(rewards: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """Returns rewards minus `baseline` f32[groups], the reward of a greedy response to each prompt.

    ReMax: arXiv:2310.10505, equation 5.
    """
    return (_checked(rewards) - _checked(baseline[:, None])).astype(np.float32)


@ADVANTAGES.register("none")
def none(rewards: np.ndarray) -> np.ndarray:
    """Returns the rewards themselves, f32[groups, M]."""
    return _checked(rewards).astype(np.float32)


def _centred(rewards: np.ndarray) -> np.ndarray:
    """Returns rewards minus their group's mean, f64[groups, M]."""
    exact = _checked(rewards)
    return exact - exact.mean(axis=1, keepdims=True)


def _checked(rewards: np.ndarray) -> np.ndarray:
    """Returns rewards as f64, if all are finite."""
    if not np.isfinite(rewards).all():
        row, sample = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(f"reward {rewards[row, sample]} of group {row}, sample {sample}: "
                         "rewards must be finite")
    return rewards.astype(np.float64)
