"""`respec`, the paper's solver: the best (depth, branch, nodes) for the number of active rows.

It holds settings with the tokens that each gives a row and round, and takes the one that promises
most tokens per second, or none where that is not more than plain decoding (arXiv 2510.26475,
section 5.1).
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import ControlConfig, SpecOptions, check
from specrl_jax.control import cost_model
from specrl_jax.control.buckets import Bucket
from specrl_jax.control.cost_model import CostEstimate, CostTable, RoundCosts
from specrl_jax.control.protocol import NEVER_REPLAN, Controller, Limits, Plan, make_spec, mean_rows
from specrl_jax.structs import Array, LaunchRecord, Load, carrier

OFF = -1  # no setting

Setting = tuple[int, int, int]


class Respec(struct.PyTreeNode):
    """The controller's state. `setting` is being profiled; OFF once all were."""

    costs: CostEstimate
    tokens: Array  # f32[settings] committed
    rows: Array  # f32[settings] live rows, summed over rounds
    setting: Array  # i32[]


def make(control: ControlConfig, spec: SpecOptions, limits: Limits) -> Controller:
    """Returns the controller of control.policy = respec.

    The paper profiles before training, at every batch size. Here costs are measured so, and the
    tokens of drafts are those of the first launches that draft, one a setting.
    """
    settings = settings_of(control.settings, limits)
    listed = np.asarray([*settings, (0, limits.branch, limits.nodes)], np.int32)  # OFF is the last

    def init(costs: CostTable | None) -> Respec:
        zero = np.zeros(len(settings), np.float32)
        return carrier(Respec, costs=cost_model.estimate(costs, limits), tokens=zero, rows=zero,
                       setting=np.int32(0 if settings else OFF))

    def plan(state: Respec, load: Load) -> Plan:
        rows = load.live.shape[0]
        chosen = jnp.int32(OFF)
        if settings and len(limits.buckets[rows]) > 1:
            costs = cost_model.at(state.costs, limits, rows, jnp.float32(limits.longest / 2))
            gains = speedups(settings, state.tokens / jnp.maximum(state.rows, 1.0), costs,
                             limits.buckets[rows], mean_rows(load))
            best = jnp.where(gains.max() > 1, jnp.argmax(gains), OFF).astype(jnp.int32)
            chosen = jnp.where(state.setting == OFF, best, state.setting)
        depth, branch, nodes = jnp.asarray(listed)[chosen]
        spec = make_spec(0, 1, 1, 0, limits.mix).replace(depth=depth, branch=branch, nodes=nodes)
        return Plan(spec, jnp.int32(NEVER_REPLAN))

    def end_chunk(state: Respec, launch: LaunchRecord) -> tuple[Respec, Mapping[str, float]]:
        setting = int(state.setting)
        if setting == OFF or not launch.draft_rounds:
            return state, {}
        tokens, rows = np.array(state.tokens), np.array(state.rows)
        tokens[setting] += launch.committed
        rows[setting] += launch.row_rounds
        following = setting + 1 if setting + 1 < len(settings) else OFF
        return state.replace(tokens=tokens, rows=rows, setting=np.int32(following)), {}

    return Controller(init=init, plan=plan, end_chunk=end_chunk)


def settings_of(named: Sequence[str], limits: Limits) -> list[Setting]:
    """Returns the named settings, or a range of depths, as chains and as trees.

    Raises:
      ConfigError: one is beyond the limits.
    """
    depth, branch, nodes = limits.depth, limits.branch, limits.nodes
    chosen: list[Setting] = []
    for text in named:
        d, k, n = map(int, text.split("x"))
        check(d <= depth and k <= branch and n <= nodes, "control.settings", text,
              f"the bounds are spec.max_depth = {depth}, spec.max_branch = {branch}, "
              f"spec.max_nodes = {nodes}")
        chosen.append((d, k, n))
    if chosen:
        return chosen
    depths = sorted({min(2**i, depth) for i in range(depth.bit_length() + 1)} - {0})
    return list(dict.fromkeys((d, k, min(1 + d * k, nodes)) for k in (1, branch) for d in depths))


def speedups(settings: Sequence[Setting], tokens: Array, costs: RoundCosts,
             buckets: Sequence[Bucket], rows: Array) -> Array:
    """Returns f32[settings] predicted speeds over plain decoding, from tokens a row and round."""
    depth, _, nodes = jnp.asarray(settings).T
    packed, widest = jnp.asarray(buckets).T
    fits = (rows * nodes[:, None] <= packed[None]) & (nodes[:, None] <= widest[None])
    bucket = jnp.where(fits.any(1), jnp.argmax(fits, 1), len(buckets) - 1)
    seconds = costs.verify[bucket] + costs.draft[depth]
    return tokens * costs.verify[0] / jnp.maximum(seconds, 1e-9)
