"""The RL algorithm that a config names: an advantage, a loss and a correction."""

from typing import NamedTuple

import numpy as np

from specrl_jax.config import RLConfig
from specrl_jax.rl.advantage import ADVANTAGES, Advantage
from specrl_jax.rl.corrections import CORRECTIONS, Correction
from specrl_jax.rl.losses import LOSSES, Loss


class Algorithm(NamedTuple):
    """Pure functions, each from the registry of its config field."""

    advantage: Advantage
    loss: Loss
    correction: Correction

    def advantages(self, rewards: np.ndarray, group: int, baseline: np.ndarray | None = None
                   ) -> np.ndarray:
        """Returns f32[Q] from rewards f32[Q] of groups of `group` samples, and from the reward of
        each prompt's greedy response, f32[groups], where the advantage asks for it."""
        more = {} if baseline is None else {"baseline": baseline}
        return self.advantage(rewards.reshape(-1, group), **more).reshape(-1)


def resolve(config: RLConfig) -> Algorithm:
    """Returns the functions that `config` names. Raises ConfigError if a name is unknown."""
    return Algorithm(ADVANTAGES.resolve(config.advantage), LOSSES.resolve(config.loss),
                     CORRECTIONS.resolve(config.correction))
