"""The perturbed argmax for GPUs: a Pallas kernel that Triton compiles, one program a block."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specrl_kernels.gumbel_argmax import block as shared
from specrl_kernels.gumbel_argmax import gpu
from specrl_kernels.gumbel_argmax.drawn import Drawn
from specrl_kernels.triton_call import triton_call

NAME = "pallas_triton"


def gumbel_argmax_pallas_triton(*args: Any, **options: Any) -> Drawn:
    """See `api.gumbel_argmax`."""
    return gpu.gumbel_argmax(_race, NAME, *args, **options)


def _race(inputs: list[jax.Array], outputs: list[jax.ShapeDtypeStruct], *, size: int, count: int,
          truncated: bool, config: gpu.Config, interpret: bool) -> Sequence[jax.Array]:
    kernel = functools.partial(_kernel, size=size, count=count, truncated=truncated)
    return triton_call(kernel, "gumbel_argmax", outputs[0].shape[:2], outputs, inputs,
                       warps=config.warps, stages=1, interpret=interpret,
                       cost=shared.estimate(inputs[0], outputs[0].size // outputs[0].shape[1]))


def _kernel(logits: Any, floats: Any, integers: Any, out: Any, tokens: Any, *, size: int,
            count: int, truncated: bool) -> None:
    """One block at one position."""
    block, position = pl.program_id(0), pl.program_id(1)
    vocab, lanes = logits.shape[1], out.shape[2]
    start = jnp.minimum(block * size, vocab - size)
    at = pl.ds(position, 1)
    values = logits[at, pl.ds(start, size)]
    ids = start + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    one = lambda ref, i: ref[position, i].reshape(1, 1)  # noqa: E731
    found, who = shared.race(
        values, ids, ids >= block * size, [one(floats, i) for i in range(shared.FLOATS)],
        [one(integers, i) for i in range(shared.INTEGERS)], count, truncated)
    places = jax.lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
    out[block, at, :] = shared.side_by_side(found, places)
    tokens[block, at, :] = shared.side_by_side(who, places)
