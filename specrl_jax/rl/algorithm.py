"""The RL algorithm that a config names: an advantage, a loss and a correction."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specrl_jax.config import Config, RLConfig, check
from specrl_jax.config.rl import WITH_RATIO
from specrl_jax.rl.advantage import ADVANTAGES, Advantage
from specrl_jax.rl.losses import CORRECTIONS, LOSSES, Correction, Loss


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


def check_training(config: Config, warn: Callable[[str], None]) -> None:
    """Warns of a training at temperature 0, of options that are set and not read, and of a loss
    that does not fit the number of updates on a rollout.

    Raises:
      ConfigError: at temperature 0 samples equal the greedy baseline; a config may have both, as an
        evaluation of the run may be greedy.
    """
    rl, quota = config.rl, config.rollout.quota
    check(not quota or config.spec.rule == "match", "spec.rule", config.spec.rule,
          "with rollout.quota, whose tokens must not depend on drafts; use match")
    if not rl.updates:
        return
    if quota and rl.correction == "none" and config.learner.old_logprob == "learner":
        warn("rl.correction = 'none': with rollout.quota older policies drew some of the tokens; "
             "use truncated, or learner.old_logprob = rollout")
    for line in (*rl.unread(), *config.learner.unread()):
        warn(line)
    steps, given = rl.updates * rl.minibatches, config.learner.old_logprob == "rollout"
    if steps > 1 and rl.loss == "reinforce":
        warn("rl.loss = 'reinforce': has no ratio, so that updates after the first on a rollout "
             "are off-policy; use ppo_clip, or rl.minibatches = rl.updates = 1")
    set_bounds = (rl.clip_low, rl.clip_high) != (RLConfig.clip_low, RLConfig.clip_high)
    if steps == 1 and not given and rl.loss in WITH_RATIO and (
            set_bounds or rl.loss != RLConfig.loss):
        warn(f"rl.minibatches = 1: with one update on a rollout every ratio is 1, so that "
             f"rl.loss = {rl.loss} clips nothing; set 2 or more")
    if not config.rollout.temperature:
        check(not config.rl.greedy, "rollout.temperature", 0.0, "all answers are the greedy "
              "one, so that rl.advantage = greedy_baseline is 0; set it to 1")
        warn("rollout.temperature = 0: all answers to a prompt are the same, so that no group has "
             "an advantage; set it to 1")
