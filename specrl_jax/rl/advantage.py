"""Advantages from the rewards of a prompt's samples. Host functions of numpy arrays.

They compute in float64 and return float32. The mean of M equal float32 rewards is exact in float64,
so a group that agrees gets advantages of exactly zero, not of rounding noise divided by `eps`.
"""

import numpy as np


def group_advantages(rewards: np.ndarray, *, scale: bool, eps: float = 1e-6) -> np.ndarray:
    """Group-relative advantages: `reward - mean`, and with `scale` divided by `std + eps`.

    `scale=True` is GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2), `scale=False` Dr. GRPO
    (arXiv:2503.20783, section 3). The first paper writes std without saying which. This is the
    population's (divisor M): two samples that differ get -1 and 1, and every group's advantages
    have mean square 1. The sample's (divisor M - 1) would scale all of them by sqrt((M - 1) / M).

    Args:
      rewards: f32[groups, M], the M samples of each prompt; M >= 2.
      scale: divide by the group's standard deviation.
      eps: added to the standard deviation, in units of reward.

    Returns:
      f32[groups, M]; exactly 0 for a group whose rewards are all equal.

    Raises:
      TypeError: `rewards` is not float32 of rank 2.
      ValueError: M < 2, or a reward is not finite.
    """
    centred = _centred(rewards)
    if scale:
        centred = centred / (np.sqrt(np.mean(centred**2, axis=1, keepdims=True)) + eps)
    return centred.astype(np.float32)


def leave_one_out_advantages(rewards: np.ndarray) -> np.ndarray:
    """RLOO: each reward less the mean of the group's other rewards.

    Ahmadian et al., arXiv:2402.14740, section 2. `r_i - (sum - r_i) / (M - 1)` equals
    `(r_i - mean) M / (M - 1)`, which is how it is computed.

    Args:
      rewards: f32[groups, M]; M >= 2.

    Returns:
      f32[groups, M]; exactly 0 for a group whose rewards are all equal.

    Raises:
      TypeError: `rewards` is not float32 of rank 2.
      ValueError: M < 2, or a reward is not finite.
    """
    size = np.shape(rewards)[-1]
    centred = _centred(rewards)
    return (centred * (size / (size - 1))).astype(np.float32)


def _centred(rewards: np.ndarray) -> np.ndarray:
    """f64[groups, M]: rewards less their group's mean."""
    rewards = np.asarray(rewards)
    if rewards.ndim != 2 or rewards.dtype != np.float32:
        raise TypeError(f"rewards must be f32[groups, M], got {rewards.dtype}{list(rewards.shape)}")
    if rewards.shape[1] < 2:
        raise ValueError(f"rewards of shape {list(rewards.shape)}: a group needs 2 samples or more")
    if not np.isfinite(rewards).all():
        group, sample = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(f"reward {rewards[group, sample]} of group {group}, sample {sample}: "
                         "rewards must be finite")
    exact = rewards.astype(np.float64)
    return exact - exact.mean(axis=1, keepdims=True)
