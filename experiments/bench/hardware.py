"""Measured limits of this machine (bandwidth, FLOP/s), and its description."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.runtime.machine import cores, processor

from .timing import alternate, seconds_of

PROBE_BYTES = 512 * 10**6
GEMM_SIZES = (1024, 2048)
PACKAGES = ("jax", "jaxlib", "numpy")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Bandwidth and FLOP/s of the fastest probe of each kind."""

    bandwidth: float  # bytes/s
    peak: float  # FLOP/s
    bandwidth_probes: dict[str, float]
    peak_probes: dict[str, float]

    def best(self, other: "Hardware") -> "Hardware":
        """Returns the faster of two measurements, probe by probe."""
        return _hardware(*({name: max(probe[name], again[name]) for name in probe} for probe, again
                           in ((self.bandwidth_probes, other.bandwidth_probes),
                               (self.peak_probes, other.peak_probes))))


class Probes:
    """Compiled probes of the machine: reads of `probe_bytes`, and square matrix products.

    On a shared machine both limits change within minutes, so probe right before and after the runs
    that they bound.
    """

    def __init__(self, probe_bytes: int = PROBE_BYTES, sizes: tuple[int, ...] = GEMM_SIZES) -> None:
        self.bandwidth = _bandwidth_programs(probe_bytes)
        self.peak = _peak_programs(sizes)
        self.measure(repeats=1)  # compiles

    def measure(self, repeats: int = 5) -> Hardware:
        """Returns the limits from the fastest of `repeats` calls of each probe, in float32."""
        return _hardware(_speeds(self.bandwidth, repeats), _speeds(self.peak, repeats))


def probes_here(tiny: bool) -> Probes:
    """Returns probes large enough for this device; `tiny` ones are for tests only."""
    if tiny:
        return Probes(4 * 10**6, (64,))
    on_cpu = jax.default_backend() == "cpu"
    return Probes(PROBE_BYTES if on_cpu else 16 * PROBE_BYTES, (2048,) if on_cpu else (8192,))


@dataclasses.dataclass(frozen=True)
class Probe:
    """A jitted program, and the bytes or FLOPs of one call."""

    program: Callable[..., Any]
    args: tuple[Any, ...]
    work: float

    def __call__(self) -> Any:
        return self.program(*self.args)


def _hardware(bandwidth: dict[str, float], peak: dict[str, float]) -> Hardware:
    return Hardware(max(bandwidth.values()), max(peak.values()), bandwidth, peak)


def _speeds(probes: dict[str, Probe], repeats: int) -> dict[str, float]:
    """Returns the bytes/s or FLOP/s of each probe at its fastest."""
    tasks = {name: (lambda probe=probe: seconds_of(probe, jax.block_until_ready))
             for name, probe in probes.items()}
    return {name: probes[name].work / min(seconds)
            for name, seconds in alternate(tasks, repeats).items()}


def _bandwidth_programs(probe_bytes: int) -> dict[str, Probe]:
    """Returns reductions and matrix-vector products that read `probe_bytes` of float32."""
    width, count = 1024, 16
    rows = probe_bytes // (4 * width * count)
    parts = [jnp.full((rows, width), 0.5) for _ in range(count)]
    wide = jnp.ones(width)
    work = count * rows * width * 4
    reductions = {"sum": lambda parts, x: [a.sum() for a in parts],
                  "max": lambda parts, x: [a.max() for a in parts],
                  "matrix_vector": lambda parts, x: [a @ x for a in parts],
                  "dot": lambda parts, x: [jnp.vdot(a, b) for a, b in
                                           zip(parts[::2], parts[1::2], strict=True)]}
    return {name: Probe(jax.jit(f), (parts, wide), work) for name, f in reductions.items()}


def _peak_programs(sizes: tuple[int, ...]) -> dict[str, Probe]:
    """Returns square float32 products in two orientations."""
    orientations = {"a @ b": lambda a, b: a @ b, "a @ b.T": lambda a, b: a @ b.T}
    programs = {}
    for size in sizes:
        pair = (jnp.full((size, size), 0.5), jnp.full((size, size), 0.25))
        programs |= {f"{name}, {size}": Probe(jax.jit(f), pair, 2 * size**3)
                     for name, f in orientations.items()}
    return programs


def first_device() -> Any:
    """Returns JAX's first device, or ends the process with a line where JAX finds none."""
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as error:
        asked: Any = jax.config
        raise SystemExit(f"error: JAX_PLATFORMS = {asked.jax_platforms!r}: JAX finds no such "
                         "device; unset it, set cpu, or install JAX for the device") from error


def machine(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns device, processor, cores and versions, which every result contains."""
    device = first_device()
    versions = {name: importlib.metadata.version(name) for name in (*PACKAGES, *packages)}
    return {"device": device.device_kind, "platform": device.platform, "processor": processor(),
            "cores": cores(), "python": platform.python_version(), "versions": versions}
