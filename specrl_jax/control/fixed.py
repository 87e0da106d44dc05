"""`off` and `fixed`: controllers that plan the same for every round."""

import jax.numpy as jnp

from specrl_jax.control.protocol import NEVER_REPLAN, Controller, Plan, make_spec, prune_within
from specrl_jax.structs import Array, DraftTree, Load, SpecConfig


def off() -> Controller:
    """Returns plain decoding: every round is the bucket (B, 1)."""
    return Controller(init=lambda costs: (), plan=lambda state, load: Plan(
        make_spec(0, 1, 1, 0), jnp.int32(NEVER_REPLAN)))


def fixed(min_survival: float = 0.0, spec: SpecConfig | None = None) -> Controller:
    """Returns the controller whose state is the SpecConfig of every round.

    Args:
      min_survival: least cumulative acceptance probability of a node that is verified.
      spec: the initial state; None drafts nothing.
    """
    def prune(state: SpecConfig, plan: Plan, load: Load, tree: DraftTree, buckets
              ) -> tuple[Array, Array]:
        likely = tree.live & (tree.survival >= min_survival)
        return prune_within(plan.spec, tree.replace(live=likely), buckets)

    return Controller(init=lambda costs: make_spec(0, 1, 1, 0) if spec is None else spec,
                      plan=lambda state, load: Plan(state, jnp.int32(NEVER_REPLAN)), prune=prune)
