"""The controllers that control.policy may name."""

from collections.abc import Callable

from specrl_jax.config import ControlConfig, SpecOptions, check
from specrl_jax.config.registry import Registry
from specrl_jax.control import budget, cost_file, fixed, respec
from specrl_jax.control.protocol import Controller, ControllerFactory, Limits, make_spec

CONTROLLERS: Registry[ControllerFactory] = Registry("control.policy", Callable)
CONTROLLERS.update({
    "off": lambda control, spec, limits: fixed.off(),
    "fixed": lambda control, spec, limits: fixed.fixed(control.min_survival, make_spec(
        spec.depth, spec.branch, spec.nodes, spec.budget, limits.mix)),
    "budget": budget.make, "respec": respec.make})
register_controller = CONTROLLERS.register  # decorates a factory: @register_controller("name")


def make(control: ControlConfig, spec: SpecOptions, limits: Limits) -> Controller:
    """Returns the controller of `control.policy`, plain decoding where nothing drafts; raises
    ConfigError if control.policy names no controller, or control.cost_table no possible file."""
    cost_file.check_place(control.cost_table)
    factory = CONTROLLERS.resolve(control.policy)
    controller = fixed.off() if spec.drafter == "off" else factory(control, spec, limits)
    check(isinstance(controller, Controller), "control.policy", control.policy,
          f"must make a Controller, but it made a {type(controller).__name__}")
    return controller
