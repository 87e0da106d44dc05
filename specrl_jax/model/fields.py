"""Typed reads of a model's settings, from JSON or GGUF metadata."""

import dataclasses
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from specrl_jax.config import ConfigError

LARGEST = 2**31  # sizes, ids and positions are int32
REPAIR = "correct it, or fetch the file again"


@dataclasses.dataclass(frozen=True)
class Fields:
    """Typed reads of one object; errors name file, field, value and way out."""

    values: Mapping[str, Any]
    path: str
    above: str = ""  # the section's name and a dot

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a positive whole number that int32 holds."""
        value = self.values.get(key, default)
        self.check(type(value) is int and 1 <= value < LARGEST, key, value,
                   f"must be a whole number in 1..{LARGEST - 1}; {REPAIR}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive finite number."""
        value = self.values.get(key, default)
        # NaN fails the comparison, and so does an int too large for a float.
        self.check(type(value) in (int, float) and 0 < value <= sys.float_info.max, key, value,
                   f"must be a positive number; {REPAIR}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns true or false."""
        value = self.values.get(key, default)
        self.check(type(value) is bool, key, value, f"must be true or false; {REPAIR}")
        return value

    def items(self, key: str, kind: type, size: int | None = None) -> list[Any]:
        """Returns a list of `kind`, which must have `size` items if that is given."""
        value: Any = self.values.get(key)
        self.check(isinstance(value, list) and all(type(x) is kind for x in value), key, value,
                   f"must be a list of {kind.__name__} values; {REPAIR}")
        self.check(size in (None, len(value)), key, value, f"must have {size} items; {REPAIR}")
        return value

    def section(self, key: str) -> "Fields":
        """Returns an object inside this one; a null or absent one is empty."""
        value = self.values.get(key)
        self.check(value is None or isinstance(value, dict), key, value,
                   f"must be an object or null; {REPAIR}")
        return Fields(value or {}, self.path, f"{self.above}{key}.")

    def check(self, ok: bool, key: str, value: Any, way_out: str) -> None:
        """Raises ConfigError unless `ok`."""
        if not ok:
            raise ConfigError(
                f"{self.path}: {self.above}{key} = {reprlib.repr(value)}: {way_out}")
