"""A step's rollout in passes of rollout.quota tokens a sequence.

Token counts and indices alone decide which groups a step trains on, never rounds or seconds, so
that drafts, batch sizes and restarts change nothing. Host functions.
"""

from collections.abc import Callable

import jax
import numpy as np

from specrl_jax.config import Config
from specrl_jax.rl.experience import Rewarded, take
from specrl_jax.rollout.requests import finished
from specrl_jax.structs import Metrics, Rollout


def collect(config: Config, flight: Rollout, extend: Callable[[Rollout], Rollout],
            reward: Callable[[Rollout], Rewarded]) -> tuple[Rollout, list[Rewarded]]:
    """Runs passes until enough groups are complete, and rewards those, oldest first.

    Without rl.filter these are the first prompts_per_step complete ones in canonical order. With
    it, complete groups are rewarded one after the other until as many have an advantage, or rl's
    most rollouts of them were rewarded.

    Args:
      flight: the groups in flight, in canonical order.
      extend: runs a pass.

    Returns:
      The groups that are still in flight, and the rewarded ones.
    """
    rewarded: list[Rewarded] = []
    while True:
        flight = extend(flight)
        while wanted := _wanted(config, rewarded):
            ready = np.flatnonzero(finished(flight).reshape(-1, config.responses).all(1))
            if len(ready) < (wanted if config.rl.filter == "none" else 1):
                break
            chosen, flight = _split(flight, ready[:wanted], config.responses)
            rewarded.append(reward(chosen))
        if not wanted or finished(flight).all():
            return flight, rewarded


def _wanted(config: Config, rewarded: list[Rewarded]) -> int:
    """Returns how many further groups the step rewards, if they are all that it can use."""
    groups = sum(len(one.rollout.length) for one in rewarded) // config.group_size
    used = groups if config.rl.filter == "none" else sum(one.useful for one in rewarded)
    most = config.rl.most_rollouts * config.prompts_per_step
    return max(min(config.prompts_per_step - used, most - groups), 0)


def _split(flight: Rollout, groups: np.ndarray, size: int) -> tuple[Rollout, Rollout]:
    """Returns the groups of `size` sequences at the indices `groups`, and the others."""
    chosen = np.repeat(np.isin(np.arange(len(flight.length) // size), groups), size)
    return take(flight, np.flatnonzero(chosen)), take(flight, np.flatnonzero(~chosen))


def pad(flight: Rollout, sequences: int) -> Rollout:
    """Returns groups in flight with so many sequences; the further ones have no prompt."""
    return jax.tree.map(lambda a: np.concatenate(
        [a, np.zeros((sequences - len(a), *a.shape[1:]), a.dtype)]), flight)


def unpad(flight: Rollout) -> Rollout:
    """Returns the groups that `pad` was given."""
    return take(flight, np.flatnonzero(flight.prompt_length > 0))


def metrics(rollout: Rollout, flight: Rollout, version: int, passes: int) -> Metrics:
    """Returns how old the tokens of a step are that updates the policy `version`."""
    real = np.arange(rollout.tokens.shape[1])[None] < rollout.length[:, None]
    age = np.where(real, version - rollout.version, 0)
    oldest = np.where(real, rollout.version, version).min(1)
    return {
        "rollout/passes": passes,
        "rollout/in_flight": len(flight.length),
        "stale/mean": float(age[real].mean()) if real.any() else 0.0,
        "stale/worst": int(age.max()),
        "stale/partial": float((np.where(real, rollout.version, oldest[:, None]).max(1)
                                > oldest).mean())}
