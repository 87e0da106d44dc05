"""The training schedule, and a trigger that separates the drafter's staleness from entropy.

An actor that becomes less certain accepts less from any drafter (Bebop, arXiv 2606.12370, equation
16: acceptance = a - b * entropy). So the step after a training is a reference: a line is fitted to
acceptance by entropy over its tokens. The shortfall of later steps from that line is the drafter's
own staleness; a training is due when its running mean passes a threshold.
"""

import numpy as np
from flax import struct

from specrl_jax.config import DistillConfig
from specrl_jax.structs import AnyArray

EMA_DECAY = 0.5  # of the running mean of falls
_LEAST_VARIANCE = 1e-6  # of entropy; below, acceptance is taken to be constant


class Staleness(struct.PyTreeNode):
    """State of the trigger, f64. `tokens` = 0: the next step is the reference."""

    tokens: AnyArray  # [] of the reference
    acceptance: AnyArray  # [] its mean
    entropy: AnyArray  # [] its mean
    slope: AnyArray  # [] of acceptance by entropy
    fall: AnyArray  # [] running mean of the unexplained change, relative to the reference


def forget() -> Staleness:
    """Returns the state after a training."""
    return Staleness(*(np.zeros((), np.float64) for _ in range(5)))


def observe(state: Staleness, acceptance: np.ndarray, entropy: np.ndarray,
            ema_decay: float = EMA_DECAY) -> tuple[Staleness, float]:
    """Returns the state after a step, and the part of its mean acceptance that entropy leaves.

    Of each token, `acceptance` is the probability that a first draft is accepted, and `entropy`
    the actor's, f[tokens]; `ema_decay` is the weight of the running mean so far.
    """
    a, h = (np.asarray(x, np.float64) for x in (acceptance, entropy))
    if len(a) == 0:
        return state, 0.0
    if state.tokens == 0:
        slope = ((a - a.mean()) * (h - h.mean())).mean() / h.var() if (
            h.var() > _LEAST_VARIANCE) else 0.0
        values = (len(a), a.mean(), h.mean(), slope, 0.0)
        return Staleness(*(np.asarray(x, np.float64) for x in values)), 0.0
    left = a.mean() - (state.acceptance + state.slope * (h.mean() - state.entropy))
    relative = left / max(float(state.acceptance), 1e-9)
    return state.replace(fall=ema_decay * state.fall + (1 - ema_decay) * relative), float(left)


def collects(options: DistillConfig, step: int) -> bool:
    """Whether the features of RL step `step`'s rollout are needed."""
    if options.periodic:
        return options.interval - 1 - step % options.interval < options.rollouts
    return options.when == "trigger"


def due(options: DistillConfig, step: int, state: Staleness) -> bool:
    """Whether a training follows RL step `step`."""
    if options.periodic:
        return (step + 1) % options.interval == 0
    return options.when == "trigger" and bool(state.fall < -options.threshold)
