"""A controller that drafts while few rows are live: then a forward pass has room for drafts."""

from typing import Any

import jax.numpy as jnp

from specrl_jax.config import ControlConfig, SpecOptions
from specrl_jax.control.protocol import NEVER_REPLAN, Controller, Limits, Plan, make_spec, mean_rows
from specrl_jax.structs import Load

FEW = 8  # rows of a data shard


def small_batches(control: ControlConfig, spec: SpecOptions, limits: Limits) -> Controller:
    """Returns the controller of control.policy = small_batches:small_batches."""
    whole = make_spec(limits.depth, limits.branch, limits.nodes, 0, limits.mix)

    def plan(state: Any, load: Load) -> Plan:
        depth = jnp.where(mean_rows(load) < FEW, limits.depth, 0)
        return Plan(whole.replace(depth=depth), jnp.int32(NEVER_REPLAN))

    return Controller(init=lambda costs: (), plan=plan)
