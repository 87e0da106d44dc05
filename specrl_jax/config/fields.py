"""Building blocks of config sections: fields with help, and one-line errors."""

import dataclasses
import math
from typing import Any


class ConfigError(ValueError):
    """A field has a value that cannot work; the message names field, value and way out."""


def option(default: Any, help: str) -> Any:
    """Returns a dataclass field with a help text."""
    return dataclasses.field(default=default, metadata={"help": help})


def section(cls: type, help: str) -> Any:
    """Returns a dataclass field that is itself a section of options."""
    return dataclasses.field(default_factory=cls, metadata={"help": help})


def check(ok: bool, field: str, value: Any, way_out: str) -> None:
    """Raises ConfigError naming `field`, `value` and the way out unless `ok`."""
    if not ok:
        raise ConfigError(f"{field} = {value!r}: {way_out}")


def at_least(low: int | float, **fields: Any) -> None:
    """Raises ConfigError for the first field, `__` for dots, that is no finite number >= `low`."""
    for name, value in fields.items():
        number = isinstance(value, int | float) and value < math.inf
        check(number, name.replace("__", "."), value, f"must be a number, at least {low}")
        check(value >= low, name.replace("__", "."), value, f"must be at least {low}")
