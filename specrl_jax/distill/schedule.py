"""When the drafter trains, and whether acceptance fell by more than the actor's entropy explains.

An actor that becomes less certain accepts less from any drafter (Bebop, arXiv 2606.12370, equation
16: acceptance = a - b * entropy). So the step after a training is a reference: over its tokens a
line is fitted to acceptance by entropy. What later steps fall short of that line is the drafter's
own staleness, and a training is due when its running mean passes a threshold.
"""

from typing import Any

import numpy as np
from flax import struct

from specrl_jax.config import DistillConfig

_LEAST_VARIANCE = 1e-6  # of entropy; below, acceptance is taken to be constant


@struct.dataclass
class Staleness:
    """What the trigger remembers, f64. `tokens` = 0: the next step is the reference."""

    tokens: Any  # [] of the reference
    acceptance: Any  # [] its mean
    entropy: Any  # [] its mean
    slope: Any  # [] of acceptance by entropy
    fall: Any  # [] running mean of what is not explained, relative to the reference


def forget() -> Staleness:
    """The state after a training."""
    return Staleness(*(np.zeros((), np.float64) for _ in range(5)))


def observe(state: Staleness, acceptance: np.ndarray, entropy: np.ndarray, memory: float
            ) -> tuple[Staleness, float]:
    """Adds a step.

    Args:
      acceptance, entropy: f[tokens] of the step's tokens: the chance that their first draft is
        accepted, and the actor's entropy there.
      memory: weight that earlier falls keep.

    Returns:
      the new state, and the step's mean acceptance less what its entropy explains.
    """
    a, h = (np.asarray(x, np.float64) for x in (acceptance, entropy))
    if len(a) == 0:
        return state, 0.0
    if state.tokens == 0:
        return _reference(a, h), 0.0
    expected = state.acceptance + state.slope * (h.mean() - state.entropy)
    left = a.mean() - expected
    relative = left / max(float(state.acceptance), 1e-9)
    return state.replace(fall=memory * state.fall + (1 - memory) * relative), float(left)


def _reference(a: np.ndarray, h: np.ndarray) -> Staleness:
    spread = h.var()
    slope = ((a - a.mean()) * (h - h.mean())).mean() / spread if spread > _LEAST_VARIANCE else 0.0
    values = (len(a), a.mean(), h.mean(), slope, 0.0)
    return Staleness(*(np.asarray(x, np.float64) for x in values))


def watches(options: DistillConfig) -> bool:
    """Whether every rollout's acceptance is measured."""
    return options.when == "trigger"


def late(options: DistillConfig) -> bool:
    """Whether updates run beside the policy update and are published a step late."""
    return options.when in ("overlap", "overlap_k")


def collects(options: DistillConfig, step: int) -> bool:
    """Whether the features of RL step `step`'s rollout are needed."""
    if options.when in ("every_k", "overlap_k"):
        return options.every - 1 - step % options.every < options.rollouts
    return options.when in ("every_step", "trigger", "overlap")


def due(options: DistillConfig, step: int, state: Staleness) -> bool:
    """Whether a training follows RL step `step`."""
    if options.when in ("every_k", "overlap_k"):
        return (step + 1) % options.every == 0
    if options.when == "trigger":
        return bool(state.fall < -options.threshold)
    return options.when in ("every_step", "overlap")
