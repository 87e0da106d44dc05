"""Calls kernels that Triton compiles, and hides what versions of JAX and jax-triton call otherwise.

`triton_call` is for Pallas kernels, `program_call` for Triton programs. Each imports its backend
when it is called, since either may be missing.
"""

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from specrl_kernels.dispatch import Unsupported


def triton_call(kernel: Any, name: str, grid: tuple[int, ...],
                outputs: Sequence[jax.ShapeDtypeStruct], inputs: Sequence[jax.Array], *,
                warps: int, stages: int, interpret: bool,
                aliases: Mapping[int, int] | None = None) -> Sequence[jax.Array]:
    """Compiles a Pallas kernel by Triton; the default GPU backend differs between JAX versions.

    Args:
      aliases: output that has the memory of an input, by the input's number.

    Raises:
      Unsupported: this JAX has no Pallas through Triton, which 0.11 calls deprecated.
    """
    try:
        from jax.experimental.pallas import triton as plgpu
    except ImportError as reason:
        raise Unsupported(f"JAX {jax.__version__} has no Pallas through Triton: {reason}"
                          ) from reason
    params = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, grid=grid, out_shape=outputs, compiler_params=params,
                          interpret=interpret, name=name,
                          input_output_aliases=dict(aliases or {}))(*inputs)


class Launch(NamedTuple):
    """A Triton program with its arguments and grid."""

    module: str  # where it is defined, imported only where Triton is installed
    name: str
    inputs: list[jax.Array]
    outputs: list[jax.ShapeDtypeStruct]
    grid: tuple[int, ...]
    constants: dict[str, Any]
    onto: bool = False  # the first output reuses the memory of the last input


def program_call(launch: Launch, warps: int, stages: int) -> Sequence[jax.Array]:
    """Runs a program by jax-triton, whose 0.3 and 0.4 differ in what they hand it.

    A program's parameters are all inputs, then all outputs. 0.3 names the outputs out_shape and
    hands over those that have the memory of an input besides that input; 0.4 names them out_type
    and takes the input for both, so that the input's own parameter needs something else.

    Raises:
      Unsupported: jax-triton cannot be imported, or fails with this JAX.
    """
    try:
        import jax_triton  # pyright: ignore[reportMissingImports]  # an optional dependency

        program = getattr(importlib.import_module(launch.module), launch.name)
    except ImportError as reason:
        raise Unsupported(f"jax-triton is not there: {reason}") from reason
    check_versions(jax.__version__, importlib.metadata.version("jax-triton"))
    known = inspect.signature(jax_triton.triton_call).parameters
    newer, inputs = "out_type" in known, launch.inputs
    if launch.onto and newer:
        inputs = [*inputs[:-1], inputs[0], inputs[-1]]
    return jax_triton.triton_call(
        *inputs, kernel=program, grid=launch.grid, num_warps=warps, num_stages=stages,
        input_output_aliases={len(inputs) - 1: 0} if launch.onto else {},
        **{"out_type" if newer else "out_shape": launch.outputs}, **launch.constants)


def check_versions(ours: str, theirs: str) -> None:
    """Raises Unsupported for a JAX and a jax-triton that fail together, later than this call."""
    first, second = (tuple(int(n) for n in re.findall(r"\d+", x)[:3]) for x in (ours, theirs))
    if first >= (0, 12) and second <= (0, 4, 1):
        raise Unsupported(f"jax-triton {theirs} is not traced by JAX {ours}: use JAX 0.11 or "
                          "a newer jax-triton")
