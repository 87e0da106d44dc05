"""A bandit over draft depths: each launch tries one and earns its tokens per second.

Epsilon-greedy, after TLT (arXiv 2511.16665). Depth 0 is plain decoding.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import ControlConfig, SpecOptions
from specrl_jax.control.protocol import NEVER_REPLAN, Controller, Limits, Plan, make_spec
from specrl_jax.structs import LaunchRecord, Load, carrier

EPSILON = 0.1  # share of launches that try any depth


class Bandit(struct.PyTreeNode):
    """What each depth earned, and the depth of the next launch."""

    tokens: Any  # f32[D+1]
    seconds: Any  # f32[D+1]
    depth: Any  # i32[]
    launches: Any  # i32[]


def bandit(control: ControlConfig, spec: SpecOptions, limits: Limits) -> Controller:
    """Returns the controller of control.policy = bandit:bandit."""

    def init(costs: Any) -> Bandit:
        zero = np.zeros(limits.depth + 1, np.float32)
        return carrier(Bandit, tokens=zero, seconds=zero, depth=np.int32(0), launches=np.int32(0))

    def plan(state: Bandit, load: Load) -> Plan:
        whole = make_spec(0, limits.branch, limits.nodes, 0, limits.mix)
        return Plan(whole.replace(depth=state.depth), jnp.int32(NEVER_REPLAN))

    def end_chunk(state: Bandit, launch: LaunchRecord) -> tuple[Bandit, dict[str, float]]:
        depth, launches = int(state.depth), int(state.launches) + 1
        tokens, seconds = np.array(state.tokens), np.array(state.seconds)
        tokens[depth] += launch.committed
        seconds[depth] += launch.seconds
        rng = np.random.default_rng([limits.seed, launches])
        if (seconds == 0).any():
            depth = int(np.argmin(seconds))
        elif rng.random() < EPSILON:
            depth = int(rng.integers(len(seconds)))
        else:
            depth = int(np.argmax(tokens / seconds))
        return carrier(Bandit, tokens=tokens, seconds=seconds, depth=np.int32(depth),
                       launches=np.int32(launches)), {"bandit_depth": float(depth)}

    return Controller(init, plan, end_chunk=end_chunk)
