"""The RL algorithm that a config names: an advantage, a loss and a correction."""

from typing import NamedTuple

from specrl_jax.config import RLConfig
from specrl_jax.rl.advantage import ADVANTAGES, Advantage
from specrl_jax.rl.corrections import CORRECTIONS, Correction
from specrl_jax.rl.losses import LOSSES, Loss


class Algorithm(NamedTuple):
    """Pure functions, each from the registry of its config field."""

    advantage: Advantage
    loss: Loss
    correction: Correction


def resolve(config: RLConfig) -> Algorithm:
    """Returns the functions that `config` names. Raises ConfigError if a name is unknown."""
    return Algorithm(ADVANTAGES.resolve(config.advantage), LOSSES.resolve(config.loss),
                     CORRECTIONS.resolve(config.correction))
