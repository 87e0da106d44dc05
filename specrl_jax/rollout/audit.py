"""Rounds that a controller did not choose, really run from where a rollout stands."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from specrl_jax.control.adaptive import FREE, Adaptive
from specrl_jax.rollout.counted import totals
from specrl_jax.structs import RolloutState


def compare(go: Callable[..., Any], copy: Callable[[RolloutState], RolloutState],
            state: RolloutState, control: Adaptive, before: Mapping[str, Any] | None
            ) -> dict[str, float]:
    """Seconds and tokens of one round without a draft, and of one at the best constant depth.

    Both begin where the rollout stands: a drafter that the controller left idle first reads what it
    missed, and that counts.

    Args:
      go: a launch, of (state, control, rounds); it uses up its state.
      copy: of a state, compiled.
      before: the last launch as the trace has it; None before the first.
    """
    before = before or {"committed": 0, "fixed_steps": 1}
    found, ran = {}, {}
    for name, steps in (("off", 0), ("fixed", int(before["fixed_steps"]))):
        if steps not in ran:
            copied = jax.block_until_ready(copy(state))
            forced = control.replace(force=np.asarray([steps, FREE], np.int32))
            began = time.perf_counter()
            _, _, seen = go(copied, forced, rounds=1)
            counters = jax.tree.map(np.asarray, seen)[2]
            ran[steps] = (time.perf_counter() - began,
                          totals(counters)["committed"] - before["committed"])
        found[f"audit_{name}_seconds"], found[f"audit_{name}_tokens"] = ran[steps]
    return found
