"""What happens to responses that reach rollout.max_new_tokens (rl.overlong). Host functions."""

import numpy as np

from specrl_jax.config import Config
from specrl_jax.structs import Rollout


def penalty(config: Config, rollout: Rollout) -> np.ndarray:
    """Returns what is added to the reward of each response, f32[Q], from 0 to -1.

    With rl.overlong=soft, from `overlong_tokens` before the limit on it falls in a line, to -1 at
    the limit: DAPO, arXiv:2503.14476, equation 13. A response that stops by itself is as long.
    """
    if config.rl.overlong != "soft":
        return np.zeros(len(rollout.length), np.float32)
    within, most = config.overlong_tokens, config.rollout.max_new_tokens
    return -np.maximum(0, rollout.length - (most - within)).astype(np.float32) / within


def counted(config: Config, rollout: Rollout, advantage: np.ndarray
            ) -> tuple[Rollout, np.ndarray]:
    """Returns what the update reads: with rl.overlong=mask, responses without a stop token have no
    tokens and no advantage (DAPO, section 3.4: overlong filtering)."""
    if config.rl.overlong != "mask":
        return rollout, advantage
    return (rollout.replace(length=np.where(rollout.stopped, rollout.length, 0)),
            np.where(rollout.stopped, advantage, np.float32(0)))
