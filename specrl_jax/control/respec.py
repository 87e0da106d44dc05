"""`respec`, the paper's solver, and `oracle`, which knows in hindsight what it has to measure.

Both hold settings (depth, branch, nodes a row) with the tokens that each gives a row and round, and
take the one that promises most tokens per second, or none where that is not more than plain
decoding's (arXiv 2510.26475, section 5.1).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import ControlConfig, check
from specrl_jax.control import cost_model
from specrl_jax.control.adaptive import (
    FREE,
    Adaptive,
    Bounds,
    Policy,
    context_of,
    rows_of,
)
from specrl_jax.control.cost_model import Bucket, Table
from specrl_jax.control.protocol import keep_within
from specrl_jax.structs import Array, DraftTree, Load, SpecConfig


@struct.dataclass
class Profile:
    """What each setting gives. `arm` is being measured; FREE once all were."""

    tokens: Array  # f32[arms]
    rows: Array  # f32[arms] live rows, summed over rounds
    arm: Array  # i32[]


@struct.dataclass
class Known:
    """What `oracle` goes by."""

    tokens: Array  # f32[arms] a row and round
    gain: Array  # f32[batch sizes, arms] speed over plain decoding as timed; NaN asks the tables


def respec(control: ControlConfig, bounds: Bounds, seed: int) -> Policy:
    """Profiles once, a launch a setting; then goes by the number of active rows alone.

    The paper profiles before training, at every batch size. Here costs are measured so, and what
    drafts give is taken from the first launches that draft, whatever their load, and stands.
    """
    settings = arms(control, bounds)
    zero = np.zeros(len(settings), np.float32)

    def plan(state: Adaptive, table: Table, load: Load) -> tuple[Array, Array, Array]:
        if not can_draft(settings, table):
            return _of(settings, jnp.int32(FREE))
        own, middle = state.own, jnp.mean(table.context)
        gives = own.tokens / jnp.maximum(own.rows, 1.0)
        arm = best_arm(gains(settings, gives, table, middle, rows_of(load)))
        return _of(settings, jnp.where(own.arm == FREE, arm, own.arm))

    def update(own: Profile, launch: dict[str, Any]) -> Profile:
        arm = int(own.arm)
        if arm == FREE or not launch["drafting"]:
            return own
        tokens, rows = np.array(own.tokens), np.array(own.rows)
        tokens[arm] += launch["tokens"]
        rows[arm] += launch["live"] * launch["launch_rounds"]
        return Profile(tokens, rows, np.int32(arm + 1 if arm + 1 < len(settings) else FREE))

    return Policy(init=lambda: Profile(zero, zero, np.int32(0)), plan=plan, keep=whole,
                  update=update)


def oracle(control: ControlConfig, bounds: Bounds, seed: int) -> Policy:
    """Knows control.accept, and goes by rows and context; for regret.

    Gains that were timed may be written into its state by batch size, and come before those by the
    tables: where all were timed, as in `experiments/bench_controller.py`, context counts no more.
    """
    settings, sizes = arms(control, bounds), sorted(bounds.ladders)
    check(len(control.accept) == len(settings), "control.accept", control.accept,
          f"oracle needs the tokens a row and round of each of {len(settings)} settings: "
          f"{', '.join('x'.join(map(str, s)) for s in settings)}")
    known = Known(tokens=np.asarray(control.accept, np.float32),
                  gain=np.full((len(sizes), len(settings)), np.nan, np.float32))

    def plan(state: Adaptive, table: Table, load: Load) -> tuple[Array, Array, Array]:
        if not can_draft(settings, table):
            return _of(settings, jnp.int32(FREE))
        timed = state.own.gain[sizes.index(load.live.shape[0])]
        foreseen = gains(settings, state.own.tokens, table, context_of(load), rows_of(load))
        return _of(settings, best_arm(jnp.where(jnp.isnan(timed), foreseen, timed)))

    return Policy(init=lambda: known, plan=plan, keep=whole)


def arms(control: ControlConfig, bounds: Bounds) -> np.ndarray:
    """i32[arms, 3] depth, branch, nodes of the settings to choose from; off is none of them."""
    return np.asarray(settings_of(control.settings, bounds.depth, bounds.branch, bounds.nodes),
                      np.int32).reshape(-1, 3)


def settings_of(settings: tuple[str, ...], depth: int, branch: int, nodes: int
                ) -> list[tuple[int, int, int]]:
    """What `settings` names, or a ladder of depths, as chains and as trees.

    Raises:
      ConfigError: one is beyond the bounds.
    """
    if settings:
        found = [tuple(map(int, text.split("x"))) for text in settings]
        for text, setting in zip(settings, found, strict=True):
            check(all(x <= most for x, most in zip(setting, (depth, branch, nodes), strict=True)),
                  "control.settings", text, f"the bounds are spec.max_depth = {depth}, "
                  f"spec.max_branch = {branch}, spec.max_nodes = {nodes}")
        return found
    depths = sorted({min(2**i, depth) for i in range(depth.bit_length() + 1)} - {0})
    return list(dict.fromkeys((d, k, min(1 + d * k, nodes)) for k in (1, branch) for d in depths))


def can_draft(settings: np.ndarray, table: Table) -> bool:
    """Whether there is a setting, and a bucket that holds more than roots."""
    return len(settings) > 0 and table.packed.shape[0] > 1


def gains(settings: np.ndarray, gives: Array, table: Table, context: Array, rows: Array) -> Array:
    """f32[arms] predicted speeds over plain decoding.

    Args:
      gives: f32[arms] tokens a row and round.
      rows: f32[] live rows of a shard.
    """
    verify, draft = cost_model.at(table, context)
    nodes = jnp.asarray(settings[:, 2], jnp.float32)
    bucket = cost_model.bucket_for(table, rows * nodes, nodes)
    return gives * verify[0] / jnp.maximum(verify[bucket] + draft[settings[:, 0]], 1e-9)


def best_arm(gain: Array) -> Array:
    """i32[] the arm with the highest gain, f32[arms]; FREE where none is above 1."""
    return jnp.where(gain.max() > 1, jnp.argmax(gain), FREE).astype(jnp.int32)


def _of(settings: np.ndarray, arm: Array) -> tuple[Array, Array, Array]:
    """Depth, branch and nodes of an arm; of off where it is FREE."""
    listed = jnp.asarray(np.concatenate([settings, [[0, 1, 1]]]))
    chosen = listed[jnp.where(arm == FREE, len(settings), arm)]
    return chosen[0], chosen[1], chosen[2]


def whole(state: Adaptive, table: Table, load: Load, spec: SpecConfig, tree: DraftTree,
           buckets: tuple[Bucket, ...]) -> tuple[Array, Array]:
    """A setting verifies its nodes, however likely."""
    return keep_within(state, load, spec, tree, buckets)
