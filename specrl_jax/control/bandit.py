"""`bandit`: epsilon-greedy over settings, one arm a launch, by load (TLT, arXiv 2511.16665).

The load of a launch is its batch size. An arm's worth is the median of its last rewards, tokens per
second; arms without one come first. Off is an arm. All arms compete at every batch size, where TLT
offers each range of loads a few and has a threshold of requests above which it does not draft; so
there are as many launches of trial to each batch size as there are arms.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import ControlConfig
from specrl_jax.control.adaptive import Adaptive, Bounds, Policy
from specrl_jax.control.cost_model import Table
from specrl_jax.control.respec import arms, whole
from specrl_jax.structs import Array, Load


@struct.dataclass
class Bandit:
    """Rewards by batch size, and the arm of its next launch."""

    reward: dict[str, Array]  # f32[arms, window], as a ring
    tries: dict[str, Array]  # i32[arms]
    arm: dict[str, Array]  # i32[]
    turn: Array  # i32[] launches so far


def bandit(control: ControlConfig, bounds: Bounds, seed: int) -> Policy:
    """The policy of control.policy = bandit."""
    settings = np.concatenate([np.asarray([[0, 1, 1]], np.int32), arms(control, bounds)])
    sizes = [str(rows) for rows in bounds.ladders]

    def init() -> Bandit:
        return Bandit(reward={b: np.zeros((len(settings), control.window), np.float32)
                              for b in sizes},
                      tries={b: np.zeros(len(settings), np.int32) for b in sizes},
                      arm={b: np.int32(0) for b in sizes}, turn=np.int32(0))

    def plan(state: Adaptive, table: Table, load: Load) -> tuple[Array, Array, Array]:
        if table.packed.shape[0] == 1:
            return jnp.int32(0), jnp.int32(1), jnp.int32(1)
        chosen = jnp.asarray(settings)[state.own.arm[str(load.live.shape[0])]]
        return chosen[0], chosen[1], chosen[2]

    def update(own: Bandit, launch: dict[str, Any]) -> Bandit:
        size = str(launch["batch"])
        reward, tries = np.array(own.reward[size]), np.array(own.tries[size])
        arm = int(own.arm[size])
        reward[arm, tries[arm] % control.window] = launch["tokens"] / launch["seconds"]
        tries[arm] += 1
        turn = int(own.turn) + 1
        chosen = next_arm(reward, tries, control.epsilon, np.random.default_rng([seed, turn]))
        return Bandit(reward=own.reward | {size: reward}, tries=own.tries | {size: tries},
                      arm=own.arm | {size: np.int32(chosen)}, turn=np.int32(turn))

    return Policy(init=init, plan=plan, keep=whole, update=update)


def next_arm(reward: np.ndarray, tries: np.ndarray, epsilon: float, rng: np.random.Generator
             ) -> int:
    """An arm that was never tried, else with probability epsilon any, else the best median."""
    if (tries == 0).any():
        return int(np.argmin(tries))
    if rng.random() < epsilon:
        return int(rng.integers(len(tries)))
    window = reward.shape[1]
    return int(np.argmax([np.median(reward[i, : min(n, window)]) for i, n in enumerate(tries)]))
