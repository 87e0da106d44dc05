"""What the jaxpr of a Pallas kernel says of its work, where it has no CostEstimate."""

import math
from typing import Any

import jax
from jax.extend import core

CAUSAL = ("splash_mha_", "mha_forward", "mha_backward")  # JAX's, which model/flash.py calls


def name(eqn: Any) -> str:
    """Returns the name of a kernel."""
    return eqn.params.get("name") or str(eqn.params.get("name_and_src_info", "without a name"))


def grid(eqn: Any) -> tuple[int, ...]:
    """Returns the steps of a kernel by axis; the last axis runs fastest."""
    return eqn.params["grid_mapping"].grid


def branches(eqn: Any) -> bool:
    """Returns whether a kernel's body has loops or branches that depend on values."""
    return any(one.primitive.name in ("cond", "while") for one in eqn.params["jaxpr"].eqns)


def moved(eqn: Any, share: float) -> float:
    """Returns the bytes of the blocks of operands and results that a grid moves: one more wherever
    an axis that its index map reads goes on. A `share` of the last axis is visited."""
    return sum(_moved(block, grid(eqn), share)
               for block in eqn.params["grid_mapping"].block_mappings)


def _moved(block: Any, steps: tuple[int, ...], share: float) -> float:
    body = block.index_map_jaxpr.jaxpr
    read = {atom for eqn in body.eqns for atom in eqn.invars if not isinstance(atom, core.Literal)}
    read |= {atom for atom in body.outvars if not isinstance(atom, core.Literal)}
    last = max((i + 1 for i, var in enumerate(body.invars[:len(steps)]) if var in read), default=0)
    sizes = [n if isinstance(n, int) else getattr(n, "block_size", 1) for n in block.block_shape]
    item = jax.dtypes.itemsize_bits(block.array_aval.dtype) / 8
    return item * math.prod(sizes) * math.prod(steps[:last]) * (share if last == len(steps) else 1)
