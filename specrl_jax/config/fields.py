"""Building blocks of config sections: options with help and bounds, and one-line errors."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any


class ConfigError(ValueError):
    """A field has a value that cannot work; the message names field, value and way out."""


def option(default: Any, help: str, *, low: float | None = None, within: str = "",
           choose: tuple[str, ...] = (), read_with: tuple[str, ...] = ()) -> Any:
    """Returns a dataclass field with a help text, and the bounds that a `Section` checks.

    Args:
      low: least value.
      within: interval that holds the value, such as "[0, 1)".
      choose: the values that it may have.
      read_with: another option of the section and its values with which this one is read, besides
        package.module:name; without values, all but 0 and "".
    """
    return dataclasses.field(default=default, metadata={
        "help": help, "low": low, "within": within, "choose": choose, "read_with": read_with})


def section(cls: type, help: str) -> Any:
    """Returns a dataclass field that is itself a section of options."""
    return dataclasses.field(default_factory=cls, metadata={"help": help})


def check(ok: bool, field: str, value: Any, way_out: str) -> None:
    """Raises ConfigError naming `field`, `value` and the way out unless `ok`."""
    if not ok:
        raise ConfigError(f"{field} = {value!r}: {way_out}")


def at_least(low: int | float, **fields: Any) -> None:
    """Raises ConfigError for the first field, `__` for dots, that is no finite number >= `low`."""
    for name, value in ((name.replace("__", "."), value) for name, value in fields.items()):
        number = isinstance(value, int | float) and value < math.inf
        check(number, name, value, f"must be a number, at least {low}")
        check(value >= low, name, value, f"must be at least {low}")


class Section:
    """Base of frozen dataclasses of options; construction checks the bounds of each."""

    prefix = ""  # of field names in errors, with a dot

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls.prefix = f"{prefix}." if prefix else ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            name, value, bounds = field.name, getattr(self, field.name), field.metadata
            if bounds.get("low") is not None:
                at_least(bounds["low"], **{self.prefix + name: value})
            if within := bounds.get("within"):
                self.check(_inside(value, within), name, f"must lie in {within}")
            if names := bounds.get("choose"):
                self.check(value in names, name, f"choose one of {', '.join(names)}")

    def unread(self) -> Iterator[str]:
        """Yields a line about each option that is set although another one's value ignores it."""
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            other, *values = field.metadata.get("read_with") or ("",)
            value, now = getattr(self, field.name), getattr(self, other, None)
            if other and value != field.default and not (
                    now in values or ":" in str(now) or now and not values):
                names = f" among {', '.join(values)}" if values else ""
                yield (f"{self.prefix}{field.name} = {value!r}: is not read with "
                       f"{self.prefix}{other} = {now!r}; set {self.prefix}{other}{names}")

    def check(self, ok: bool, name: str, way_out: str) -> None:
        """Raises ConfigError for the option `name` unless `ok`."""
        check(ok, self.prefix + name, getattr(self, name), way_out)


def _inside(value: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    return (low < value < high or value == low and interval[0] == "["
            or value == high and interval[-1] == "]")
