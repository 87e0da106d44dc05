"""The registry that every extension point shares."""

from collections.abc import Callable

import pytest

from specrl_jax.config import ConfigError
from specrl_jax.config.registry import Registry


@pytest.fixture
def registry():
    made = Registry("spec.drafter", Callable)

    @made.register("off")
    def off():
        return "off"

    return made


def test_register_returns_object_and_resolve_finds_it(registry):
    def mine():
        return "mine"

    assert registry.register("mine")(mine) is mine
    assert registry.names() == ["off", "mine"]
    assert registry.resolve("mine") is mine and registry["mine"] is mine
    registry.register("root")("math:sqrt")
    assert registry.resolve("root")(9) == 3 and registry.resolve("math:sqrt")(4) == 2


def test_register_taken_name_raises(registry):
    with pytest.raises(ConfigError, match="^spec.drafter = 'off': is registered already"):
        registry.register("off")(lambda: None)
    with pytest.raises(ConfigError, match="^spec.drafter = 'a:b': register a name without"):
        registry.register("a:b")


@pytest.mark.parametrize("name, line", [
    ("on", "spec.drafter = 'on': choose one of off, or name your own as package.module:name"),
    ("no_such_module:f", "spec.drafter = 'no_such_module:f': No module named 'no_such_module'; "),
    ("math:nothing", "spec.drafter = 'math:nothing': module 'math' has no attribute 'nothing'; "),
    ("math:pi", "spec.drafter = 'math:pi': must name a function, but it is of type float"),
])
def test_resolve_refuses_in_one_line(registry, name, line):
    with pytest.raises(ConfigError) as caught:
        registry.resolve(name)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
