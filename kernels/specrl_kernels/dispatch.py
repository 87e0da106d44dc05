"""Selects an implementation: a named one runs or raises; without a name the first that can runs.

An implementation is a function that raises `Unsupported` for a device, dtype or shape that it does
not support. Nothing else decides, so a call shows what is refused and why.
"""

import dataclasses
import importlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax

Interpret: TypeAlias = Any
"""Whether a Pallas kernel is interpreted; `pltpu.InterpretParams(...)` says how a TPU's is."""
GPUS = {"cuda": "gpu", "rocm": "gpu"}  # names of GPUs that lowering knows

_LOG = logging.getLogger(__name__)


class Unsupported(NotImplementedError):
    """Raised by an implementation that does not support a call; the message gives the reason."""


class Target(NamedTuple):
    """What a call is traced for."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # of device, as JAX names it: "NVIDIA H200", "TPU v5 lite", "cpu"
    named: bool  # the caller named the implementation
    interpret: Interpret = False  # Pallas kernels are interpreted, on any device
    config: Mapping[str, int] | None = None  # of the named implementation; None: its heuristic


class Device(NamedTuple):
    """What programs are traced for."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # as JAX names it: "NVIDIA H200", "TPU v5 lite", "cpu"


def traced_for() -> Device:
    """Returns the device of the mesh in scope; without a mesh, the default device.

    The mesh in scope is that of the enclosing `jax.shard_map` or `jax.sharding.use_abstract_mesh`.
    So a program for a TPU can be traced where the default device is a CPU.
    """
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device: Any = jax.sharding.get_abstract_mesh().abstract_device or default or jax.devices()[0]
    if isinstance(device, str):
        return Device(GPUS.get(device, device), device)
    platform = str(device.platform)
    return Device(GPUS.get(platform, platform), device.device_kind)


def target(implementation: str | None, platform: str | None = None, interpret: Interpret = False,
           config: Mapping[str, int] | None = None) -> Target:
    """Returns the target of a call on what is traced for, or on a `platform` that is not there.

    Raises:
      ValueError: a configuration without the name of the implementation that it is for, or an
        unknown platform.
    """
    if config is not None and implementation is None:
        raise ValueError(f"config = {dict(config)}: name the implementation that it is for")
    if platform not in (None, "cpu", "gpu", "tpu"):
        raise ValueError(f"platform = {platform!r}: choose one of cpu, gpu, tpu")
    here = traced_for()
    kind = here.kind if platform in (None, here.platform) else f"some {platform}"
    return Target(platform or here.platform, kind, implementation is not None, interpret, config)


def anywhere(function: Callable[..., Any], *platforms: str,
             unasked: Callable[..., None] | None = None) -> Callable[..., Any]:
    """Wraps a function that has no settings as an implementation.

    Args:
      platforms: where it runs; none means everywhere.
      unasked: raises Unsupported for arguments at which another implementation was measured to be
        faster; a call by name ignores it.
    """
    def call(*args: Any, target: Target, **options: Any) -> Any:
        if platforms and target.platform not in platforms:
            raise Unsupported(f"needs a {' or '.join(platforms)}, this is a {target.platform}")
        if target.config is not None:
            raise Unsupported(f"config = {dict(target.config)}: it takes none")
        result = function(*args, **options)  # what it cannot do is the better reason
        if unasked is not None and not target.named:
            unasked(*args)
        return result

    return call


def configured(kind: type[Any], given: Mapping[str, int]) -> Any:
    """Returns an implementation's Config, a dataclass, with the given fields.

    Raises:
      Unsupported: it has no such field.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name, value in given.items():
        if name not in known:
            raise Unsupported(f"config {name} = {value}: choose some of {', '.join(known)}")
    return kind(**given)


def kernel(op: str, name: str, platform: str, function: str = "") -> Callable[..., Any]:
    """Returns the implementation `op`_`name`, whose module is imported when it is first called.

    A call raises Unsupported on other platforms, and if it is to be interpreted but is not named.

    Args:
      function: another function of that module, for the same platform.
    """
    def call(*args: Any, target: Target, **options: Any) -> Any:
        if target.interpret and not target.named:
            raise Unsupported("interpretation is slow: ask for it by name")
        if not target.interpret and target.platform != platform:
            raise Unsupported(f"needs a {platform}, this is a {target.platform}; "
                              "interpret=True runs it anywhere, slowly")
        module = importlib.import_module(f"specrl_kernels.{op}.{name}")
        return getattr(module, function or f"{op}_{name}")(*args, target=target, **options)

    return call


def metadata(steps: int, trips: int = 1) -> dict[str, str]:
    """Returns the metadata that a kernel's call carries into the compiled module.

    Args:
      steps: of its grid, at most.
      trips: of the loop inside a step.
    """
    return {"steps": str(steps), "trips": str(trips)}


def automatic_axes() -> tuple[tuple[str, ...], int]:
    """Returns the axes of the mesh in scope over which the compiler may split arrays, and how many
    devices they span."""
    mesh = jax.sharding.get_abstract_mesh()
    names = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
                  if kind != jax.sharding.AxisType.Manual)
    return names, math.prod(mesh.shape[name] for name in names)


def choose(implementations: Mapping[str, Callable[..., Any]], name: str | None
           ) -> Callable[..., Any]:
    """Returns the implementation `name`, or without a name a function that tries all in order.

    Raises:
      ValueError: `name` is not one of `implementations`.
    """
    if name is None:
        return lambda *args, **kwargs: _first(implementations, args, kwargs)
    if name not in implementations:
        raise ValueError(f"implementation = {name!r}: choose one of {', '.join(implementations)}")
    return implementations[name]


def refusals(implementations: Mapping[str, Callable[..., Any]], *args: Any, **kwargs: Any
             ) -> dict[str, str | None]:
    """Returns why each implementation refuses these arrays or shapes; None if it runs."""
    reasons: dict[str, str | None] = {}
    for name, function in implementations.items():
        try:
            jax.eval_shape(lambda *a, call=function: call(*a, **kwargs), *args)
            reasons[name] = None
        except Unsupported as reason:
            reasons[name] = str(reason)
    return reasons


def _first(implementations: Mapping[str, Callable[..., Any]], args: tuple, kwargs: dict) -> Any:
    reasons = []
    for name, function in implementations.items():
        try:
            out = function(*args, **kwargs)
        except Unsupported as reason:
            reasons.append(Unsupported(f"{name}: {reason}"))
        else:
            _LOG.debug("%s is taken%s", name, "".join(f"; {reason}" for reason in reasons))
            return out
    raise ExceptionGroup("no implementation can do this", reasons)
