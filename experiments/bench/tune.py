"""Searches block sizes of the kernels and fills the tuning table."""

import dataclasses
import functools
import importlib.metadata
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.gumbel_argmax import block as draw_block
from specrl_kernels.gumbel_argmax import gpu as draw_gpu
from specrl_kernels.gumbel_argmax import pallas as draw_pallas
from specrl_kernels.tree_attention import gpu, packing, pallas

from . import json_file, kernels
from .kernel_shapes import HEADS, VOCABULARY, DrawShape, TreeShape
from .timing import seconds_of

Shape = TreeShape | DrawShape
Config = dict[str, int]

VALUES = {
    ("tree_attention", "pallas"): {"block": (128, 256, 512, 1024, 2048), "tile": (32, 64, 128, 256),
                                   "splits": (1, 2)},
    ("tree_attention", "pallas_triton"): {
        "block": (16, 32, 64, 128), "tile": (16, 32, 64, 128), "warps": (2, 4, 8),
        "stages": (1, 2, 3, 4), "splits": (1, 8, 16, 32, 64, 128, 256),
        "least": (2, 4, 8, 16)},
    ("gumbel_argmax", "pallas"): {"block": (512, 1024, 2048, 4096, 8192)},
    ("gumbel_argmax", "pallas_triton"): {"block": (512, 1024, 2048, 4096, 8192),
                                         "warps": (2, 4, 8)}}
VALUES |= {(op, "triton"): values for (op, name), values in VALUES.items()
           if name == "pallas_triton"}
PLATFORM = {"pallas": "tpu", "pallas_triton": "gpu", "triton": "gpu"}
GAIN = 0.99  # a configuration is better if it takes less than this share of the time
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def op_of(shape: Shape) -> str:
    return "gumbel_argmax" if isinstance(shape, DrawShape) else "tree_attention"


def tunable(shape: Shape, platform: str, interpret: bool) -> list[str]:
    """Returns the implementations of a shape that this device can run or interpret."""
    return [name for op, name in VALUES if op == op_of(shape)
            and (name != "triton" if interpret else PLATFORM[name] == platform)]


def shape_key(shape: Shape) -> dict[str, int]:
    """Returns the key under which the kernels look a shape up."""
    if isinstance(shape, DrawShape):
        return draw_block.tuning_key(shape.positions, VOCABULARY[shape.model], shape.count)
    h, g, e = HEADS[shape.model]
    return packing.tuning_key(shape.rows, g, shape.nodes * h // g, e, shape.context)


class Search:
    """Finds the best configuration of an implementation at a shape."""

    def __init__(self, platform: str, interpret: bool, repeats: int, seconds: float) -> None:
        self.platform, self.interpret, self.repeats = platform, interpret, repeats
        self.kind = jax.devices()[0].device_kind
        self.end = time.monotonic() + seconds

    def in_time(self) -> bool:
        return time.monotonic() < self.end

    def dtype(self, shape: Shape) -> str:
        return str(jnp.dtype(kernels.dtype_of(shape, self.platform)))

    def best(self, shape: Shape, name: str) -> dict[str, Any]:
        """Returns the best row for the table.

        Raises:
          RuntimeError: not even the heuristic's configuration runs.
        """
        dtype = self.dtype(shape)
        time_of = functools.cache(lambda items: self._seconds(shape, name, dict(items)))
        first = start = tuple(heuristic(shape, name, self.kind, jnp.dtype(dtype).itemsize).items())
        if time_of(start) is None:
            raise RuntimeError(f"{name} with {dict(start)} does not run at {shape.name}")
        values, better = VALUES[op_of(shape), name], True
        while better:
            better = False
            for field, choices in values.items():
                for value in choices:
                    other = tuple((dict(start) | {field: value}).items())
                    found = time_of(other) if self.in_time() else None
                    if found is not None and found < GAIN * time_of(start):
                        start, better = other, True
        took, before = (round(1e6 * time_of(items), 2) for items in (start, first))
        return {"op": op_of(shape), "implementation": name, "dtype": dtype,
                "shape": shape_key(shape), "config": dict(start), "microseconds": took,
                "heuristic": {"config": dict(first), "microseconds": before}}

    def _seconds(self, shape: Shape, name: str, config: Config) -> float | None:
        """Returns the median seconds; None if it cannot run or its result is wrong."""
        try:
            contender = self._contender(shape, name, config=config, interpret=self.interpret)
            if not agree(contender, self._contender(shape, "xla"), self.dtype(shape)):
                return None
            task = kernels.prepared(contender, 1 if self.interpret else kernels.COPIES, 1)
            task()
        except (Unsupported, jax.errors.JaxRuntimeError, ValueError, NotImplementedError):
            return None
        return statistics.median(
            seconds_of(task, jax.block_until_ready) for _ in range(self.repeats))

    def _contender(self, shape: Shape, name: str, **options: Any) -> kernels.Contender:
        if isinstance(shape, DrawShape):
            return kernels.draw_contender(shape, name, **options)
        return kernels.tree_contender(shape, jnp.dtype(self.dtype(shape)), name, **options)


def heuristic(shape: Shape, name: str, kind: str, itemsize: int) -> Config:
    """Returns the configuration that the kernel uses without a row in the table."""
    if isinstance(shape, DrawShape):
        vocab = VOCABULARY[shape.model]
        return dataclasses.asdict(draw_pallas.Config() if name == "pallas" else
                                  draw_gpu.heuristic(shape.positions, vocab))
    h, g, e = HEADS[shape.model]
    if name == "pallas":
        return dataclasses.asdict(pallas.heuristic(kind, [shape.context], g * e * itemsize))
    return dataclasses.asdict(gpu.heuristic(shape.rows, g, shape.nodes * h // g, e, shape.context,
                                            itemsize))


def agree(one: kernels.Contender, other: kernels.Contender, dtype: str) -> bool:
    """Returns whether two results are equal up to rounding and one draw in a hundred."""
    with jax.default_matmul_precision("highest"):
        a, b = (np.asarray(jax.jit(x.step)(x.carry, x.large)).astype(np.float32)
                for x in (one, other))
    return bool((np.abs(a - b) <= TOLERANCE[dtype]).mean() >= 0.99)


class Table:
    """A tuning table, rewritten after each row.

    Args:
      path: the file; its rows stay unless they are measured again.
      kind: of the device.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
        self.found = {"device": kind, "versions": self.versions, "rows": []}
        if path.exists():
            self.found = json.loads(path.read_text(encoding="utf-8"))

    def holds(self, shape: Shape, name: str, dtype: str) -> bool:
        """Returns whether there is a row measured with these versions."""
        wanted = (op_of(shape), name, dtype, shape_key(shape))
        return any(_key(row) == wanted and row["versions"] == self.versions
                   for row in self.found["rows"])

    def add(self, row: dict[str, Any]) -> None:
        """Writes a row in place of an older one of the same shape."""
        row |= {"versions": self.versions}
        kept = [old for old in self.found["rows"] if _key(old) != _key(row)]
        self.found["rows"] = [*kept, row]
        json_file.write(self.path, self.found)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["op"], row["implementation"], row["dtype"], row["shape"]


def line(shape: Shape, row: dict[str, Any]) -> str:
    """Returns one line for the terminal."""
    return (f"{shape.name}: {row['implementation']} {row['config']} {row['microseconds']} us, "
            f"heuristic {row['heuristic']['microseconds']} us")
