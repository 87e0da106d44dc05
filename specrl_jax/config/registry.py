"""Registries: what a config field that names an algorithm may hold."""

import importlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from specrl_jax.config.fields import ConfigError, check

T = TypeVar("T")
Registered = TypeVar("Registered")


class Registry(dict[str, T | str], Generic[T]):
    """The objects that one config field can name, by name.

        DRAFTERS: Registry[Drafter] = Registry("spec.drafter", Drafter)

        @DRAFTERS.register("mine")
        def make(...): ...

        DRAFTERS.resolve("mine")
        DRAFTERS.resolve("package.module:make")  # needs no registration

    Args:
      field: dotted name of the config field, for errors.
      kind: class of the registered objects, or `Callable`; `resolve` imports nothing else.
    """

    def __init__(self, field: str, kind: Any = object) -> None:
        super().__init__()
        self.field, self.kind = field, kind

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Returns a decorator that registers an object under `name` and returns it unchanged.

        A string "package.module:name" stands for an object that `resolve` imports when it is used.
        Registering the same definition again, as a notebook's cell does, replaces it.

        Raises:
          ConfigError: the name is taken by another object, or contains a colon.
        """
        check(bool(name) and ":" not in name, self.field, name, "register a name without a colon")

        def add(registered: Registered) -> Registered:
            check(name not in self or _definition(self[name]) == _definition(registered),
                  self.field, name, "is registered already; choose another name")
            self[name] = cast(Any, registered)
            return registered

        return add

    def names(self) -> list[str]:
        """Returns the registered names in the order of their registration."""
        return list(self)

    def resolve(self, name: str) -> T:
        """Returns the object registered as `name`, or the one that "package.module:name" imports.
        Raises ConfigError if there is no such object, or it has the wrong type."""
        entry = self.get(name, name)
        if not isinstance(entry, str):
            return entry
        module, colon, attribute = entry.partition(":")
        check(bool(module and colon and attribute), self.field, name,
              f"choose one of {', '.join(self)}, or name your own as package.module:name")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except AttributeError as error:
            raise ConfigError(f"{self.field} = {name!r}: {error}; name something that it defines"
                              ) from error
        except (ImportError, SyntaxError) as error:
            raise ConfigError(f"{self.field} = {name!r}: {error}; its module must be importable, "
                              "for example from a directory in PYTHONPATH") from error
        kind = "function" if self.kind is Callable else self.kind.__name__
        check(isinstance(value, self.kind), self.field, name,
              f"must name a {kind}, but it is of type {type(value).__name__}")
        return value


def _definition(registered: object) -> tuple[str, str] | int:
    """Where a function or class is defined; other objects are told apart by identity."""
    name = getattr(registered, "__qualname__", None)
    return id(registered) if name is None else (getattr(registered, "__module__", ""), name)
