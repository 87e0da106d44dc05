"""The RL algorithm that a config names: an advantage, a loss and a correction."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specrl_jax.config import Config, RLConfig, check
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


def check_temperature(config: Config, warn: Callable[[str], None]) -> None:
    """Warns of a training at temperature 0. Raises ConfigError if its baseline is greedy, too; a
    config may have both, since an evaluation of the run may be greedy."""
    if config.rl.updates and not config.rollout.temperature:
        check(not config.rl.greedy, "rollout.temperature", 0.0, "all answers are the greedy "
              "one, so that rl.advantage = greedy_baseline is 0; set it to 1")
        warn("rollout.temperature = 0: all answers to a prompt are the same, so that no group has "
             "an advantage; set it to 1")
