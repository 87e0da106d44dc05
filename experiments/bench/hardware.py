"""What this machine can do at most, and on what it was measured."""

import dataclasses
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .timing import alternate, seconds_of

PROBE_BYTES = 512 * 10**6
GEMM_SIZES = (1024, 2048, 3072)
PACKAGES = ("jax", "jaxlib", "numpy")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The fastest of all probes. Bounds divide by these."""

    bandwidth: float  # bytes/s
    peak: float  # FLOP/s
    bandwidth_probes: dict[str, float]
    peak_probes: dict[str, float]

    def best(self, other: "Hardware") -> "Hardware":
        """The faster of two measurements, probe by probe."""
        return _hardware(*({name: max(probe[name], again[name]) for name in probe} for probe, again
                           in ((self.bandwidth_probes, other.bandwidth_probes),
                               (self.peak_probes, other.peak_probes))))


def measure(probe_bytes: int = PROBE_BYTES, sizes: tuple[int, ...] = GEMM_SIZES, repeats: int = 5
            ) -> Hardware:
    """Probes the machine: reads of `probe_bytes` and square GEMMs, float32."""
    return _hardware(_bandwidths(probe_bytes, repeats), _peaks(sizes, repeats))


def _hardware(bandwidth: dict[str, float], peak: dict[str, float]) -> Hardware:
    return Hardware(max(bandwidth.values()), max(peak.values()), bandwidth, peak)


def _fastest(programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], repeats: int
             ) -> dict[str, float]:
    """Least seconds of each jitted program."""
    def run(name: str) -> float:
        function, args = programs[name]
        return seconds_of(lambda: function(*args), jax.block_until_ready)

    tasks = {name: (lambda name=name: run(name)) for name in programs}
    alternate(tasks, 1)  # compiles
    return {name: min(seconds) for name, seconds in alternate(tasks, repeats).items()}


def _bandwidths(probe_bytes: int, repeats: int) -> dict[str, float]:
    """bytes/s of reductions and matrix-vector products that read `probe_bytes` of float32."""
    width, count = 1024, 16
    rows = probe_bytes // (4 * width * count)
    parts = [jnp.full((rows, width), 0.5) for _ in range(count)]
    wide, tall = jnp.ones(width), jnp.ones(rows)
    programs = {
        "sum": (jax.jit(lambda parts: [a.sum() for a in parts]), (parts,)),
        "max": (jax.jit(lambda parts: [a.max() for a in parts]), (parts,)),
        "matrix_vector": (jax.jit(lambda parts, x: [a @ x for a in parts]), (parts, wide)),
        "vector_matrix": (jax.jit(lambda parts, x: [x @ a for a in parts]), (parts, tall)),
        "dot": (jax.jit(lambda parts: [jnp.vdot(a, b) for a, b in
                                       zip(parts[::2], parts[1::2], strict=True)]), (parts,))}
    size = count * rows * width * 4
    return {name: size / least for name, least in _fastest(programs, repeats).items()}


def _peaks(sizes: tuple[int, ...], repeats: int) -> dict[str, float]:
    """FLOP/s of square float32 products in three orientations."""
    orientations = {"a @ b": lambda a, b: a @ b, "a @ b.T": lambda a, b: a @ b.T,
                    "a.T @ b": lambda a, b: a.T @ b}
    found = {}
    for size in sizes:
        pair = (jnp.full((size, size), 0.5), jnp.full((size, size), 0.25))
        programs = {f"{name}, {size}": (jax.jit(f), pair) for name, f in orientations.items()}
        found |= {name: 2 * size**3 / least
                  for name, least in _fastest(programs, repeats).items()}
    return found


def peak_rss() -> int:
    """Most bytes of memory this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Device, cores and versions, as every result carries them."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in (*PACKAGES, *packages)}
    return {"device": device.device_kind, "platform": device.platform, "cores": cores(),
            "python": platform.python_version(), "versions": versions}


def as_json(found: Hardware) -> dict[str, Any]:
    return dataclasses.asdict(found)


def lengths_summary(lengths: np.ndarray) -> dict[str, float]:
    """Least, median, most and sum of i32[rows]."""
    return {"min": int(lengths.min()), "median": float(np.median(lengths)),
            "max": int(lengths.max()), "sum": int(lengths.sum())}
