"""A Pallas kernel that Triton compiles: all that JAX versions name differently for it."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def triton_call(kernel: Any, name: str, grid: tuple[int, ...],
                outputs: Sequence[jax.ShapeDtypeStruct], inputs: Sequence[jax.Array], *,
                warps: int, stages: int, interpret: bool) -> Sequence[jax.Array]:
    """Asks for Triton by its parameters: the default GPU backend differs between JAX versions."""
    params = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, grid=grid, out_shape=outputs, compiler_params=params,
                          interpret=interpret, name=name)(*inputs)
