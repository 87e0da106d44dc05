"""Choosing an implementation: a named one works or raises; else the first that can is taken."""

from collections.abc import Callable, Mapping
from typing import Any


class Unsupported(NotImplementedError):
    """An implementation that cannot do what is asked; the message says why."""


def choose(implementations: Mapping[str, Callable[..., Any]], name: str | None
           ) -> Callable[..., Any]:
    """The function to call for `name`, or one that tries all of them in order.

    Raises:
      ValueError: `name` is not one of `implementations`.
    """
    if name is None:
        return lambda *args, **kwargs: _first(implementations, args, kwargs)
    if name not in implementations:
        raise ValueError(f"implementation = {name!r}: choose one of {', '.join(implementations)}")
    return implementations[name]


def _first(implementations: Mapping[str, Callable[..., Any]], args: tuple, kwargs: dict) -> Any:
    reasons = []
    for name, function in implementations.items():
        try:
            return function(*args, **kwargs)
        except Unsupported as reason:
            reasons.append(Unsupported(f"{name}: {reason}"))
    raise ExceptionGroup("no implementation can do this", reasons)
