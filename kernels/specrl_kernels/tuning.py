"""Reads measured block sizes: one table for each kind of device, tuned/<kind>.json.

{"device": "NVIDIA H200", "versions": {"jax": "..."}, "rows": [
  {"op": "tree_attention", "implementation": "pallas_triton", "dtype": "bfloat16",
   "shape": {"rows": 64, "context": 4096}, "config": {"splits": 4}, "microseconds": 41.2}]}

A row is found by op, implementation, dtype and shape class; without a row the implementation uses
its heuristic. A table exists only for devices on which the kernels have run.
"""

import functools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

FIELDS = ("op", "implementation", "dtype", "shape", "config")


def shape_class(**sizes: int) -> dict[str, int]:
    """Rounds sizes up to powers of two: shapes of one class share a configuration."""
    return {name: 1 << max(size - 1, 0).bit_length() for name, size in sizes.items()}


def lookup(kind: str, op: str, implementation: str, shape: dict[str, int], dtype: str
           ) -> dict[str, int] | None:
    """Returns the configuration of a shape class on a device kind; None if it was not measured."""
    for row in rows(kind):
        if (row["op"], row["implementation"], row["dtype"]) == (op, implementation, dtype):
            if row["shape"] == shape:
                return dict(row["config"])
    return None


def has_rows(kind: str, op: str, implementation: str) -> bool:
    """Returns whether the implementation was measured on this kind of device at all."""
    return any((row["op"], row["implementation"]) == (op, implementation) for row in rows(kind))


def rows(kind: str) -> list[dict[str, Any]]:
    """Returns all rows of a device kind; none if there is no table."""
    return load(folder() / file_name(kind))


def folder() -> Path:
    """Returns the directory of the tables."""
    return Path(str(resources.files("specrl_kernels"))) / "tuned"


def file_name(kind: str) -> str:
    """NVIDIA H200 -> nvidia_h200.json"""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_") + ".json"


@functools.cache
def load(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of one table, read once in a process; none if it does not exist.

    Raises:
      ValueError: a row lacks a field.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for number, row in enumerate(found):
        missing = [field for field in FIELDS if field not in row]
        if missing:
            raise ValueError(f"{path.name}: row {number} lacks {', '.join(missing)}")
    return found
