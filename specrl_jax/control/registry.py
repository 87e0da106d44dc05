"""Controllers by name."""

import importlib
from collections.abc import Callable

from specrl_jax.config import ConfigError, ControlConfig, SpecOptions, check
from specrl_jax.control import budget, fixed, respec
from specrl_jax.control.protocol import Controller, ControllerFactory, Limits

CONTROLLERS: dict[str, ControllerFactory] = {
    "off": fixed.make_off, "fixed": fixed.make_fixed, "budget": budget.make, "respec": respec.make}


def register_controller(name: str) -> Callable[[ControllerFactory], ControllerFactory]:
    """Returns a decorator that adds a factory as `control.policy = name`.

    Raises:
      ValueError: the name is taken.
    """
    def register(factory: ControllerFactory) -> ControllerFactory:
        if name in CONTROLLERS:
            raise ValueError(f"controller {name!r} is registered already")
        CONTROLLERS[name] = factory
        return factory

    return register


def make(control: ControlConfig, spec: SpecOptions, limits: Limits) -> Controller:
    """Returns the controller of `control.policy`; plain decoding where nothing drafts.

    Raises:
      ConfigError: control.policy names no controller.
    """
    if spec.drafter == "off":
        return fixed.off()
    return _factory(control.policy)(control, spec, limits)


def _factory(policy: str) -> ControllerFactory:
    module, colon, name = policy.partition(":")
    if not colon:
        check(policy in CONTROLLERS, "control.policy", policy,
              f"choose one of {', '.join(CONTROLLERS)}, or package.module:name")
        return CONTROLLERS[policy]
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ConfigError(f"control.policy = {policy!r}: {problem}; give package.module:name of a "
                          f"factory, or one of {', '.join(CONTROLLERS)}") from problem
