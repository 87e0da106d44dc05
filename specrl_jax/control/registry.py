"""The controller that a config names."""

from collections.abc import Callable, Sequence

from specrl_jax.config import ControlConfig, SpecOptions
from specrl_jax.control import bandit, budget, cost_model, respec
from specrl_jax.control.adaptive import Bounds, adaptive
from specrl_jax.control.protocol import Controller, fixed, make_spec, off

KINDS: dict[str, Callable[..., object]] = {
    "budget": budget.budget, "respec": respec.respec, "oracle": respec.oracle,
    "bandit": bandit.bandit}


def make(control: ControlConfig, spec: SpecOptions, mix: Sequence[float] = (1.0,), *,
         ladders: cost_model.Ladders | None = None, longest: int = 1, depth: int | None = None,
         seed: int = 0) -> Controller:
    """
    Args:
      mix: a factor for each drafter.
      ladders: buckets of each batch size of a shard; what looks at time needs them.
      longest: context that a row may reach.
      depth: D of the drafter; None is spec.max_depth.
      seed: of the bandit's explorations.
    """
    if control.policy == "off" or spec.drafter == "off":
        return off()
    if control.policy == "fixed":
        return fixed(control.min_survival, make_spec(spec.depth, spec.branch, spec.nodes,
                                                     spec.budget, mix))
    bounds = Bounds(depth=spec.max_depth if depth is None else depth, branch=spec.max_branch,
                    nodes=spec.max_nodes, mix=tuple(mix), ladders=dict(ladders or {}),
                    longest=longest)
    return adaptive(KINDS[control.policy](control, bounds, seed), control, bounds)
