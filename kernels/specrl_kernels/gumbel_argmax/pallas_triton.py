"""The perturbed argmax for GPUs: a Pallas kernel that Triton compiles.

One program is one block of the vocabulary at one position. Triton wants powers of two: the last
block is moved back to end where the vocabulary ends, and what the block before it had is hidden.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specrl_kernels.dispatch import Target, Unsupported, configured
from specrl_kernels.gumbel_argmax import block as shared
from specrl_kernels.gumbel_argmax.drawn import Drawn, Threshold, combine
from specrl_kernels.triton_call import triton_call

NAME = "pallas_triton"
PROGRAMS = 512  # enough to fill 132 multiprocessors, a few on each


@dataclasses.dataclass(frozen=True)
class Config:
    """What may be tuned; none of it changes the result beyond rounding."""

    block: int = 1024  # tokens of a program; a power of two
    warps: int = 4


def gumbel_argmax_pallas_triton(logits: jax.Array, temperature: jax.Array, key: jax.Array,
                                position: jax.Array, threshold: Threshold | None, *, count: int,
                                target: Target) -> Drawn:
    """See `api.gumbel_argmax`."""
    w, vocab = logits.shape
    config = _config(target, logits, count)
    lanes, size = shared.width(count), min(config.block, 1 << (vocab.bit_length() - 1))
    blocks = -(-vocab // size)
    kernel = functools.partial(_kernel, size=size, count=count, truncated=threshold is not None)
    outputs = [jax.ShapeDtypeStruct((blocks, w, lanes), dtype)
               for dtype in (jnp.float32, jnp.int32)]
    at = shared.positions(temperature, key, position, threshold)
    floats, tokens = triton_call(kernel, "gumbel_argmax", (blocks, w), outputs, [logits, *at],
                                 warps=config.warps, stages=1, interpret=target.interpret)
    return combine(shared.parts(floats, tokens, count, vocab), temperature == 0,
                   None if threshold is None else threshold.kept_mass)


def _config(target: Target, logits: jax.Array, count: int) -> Config:
    """The given configuration, or the tuned one, or the heuristic.

    Raises:
      Unsupported: the given one cannot be.
    """
    found = shared.tuned(target, NAME, logits, count)
    config = configured(Config, found) if found is not None else heuristic(*logits.shape)
    if any(x < 1 or x & (x - 1) for x in (config.block, config.warps)):
        raise Unsupported(f"{config}: block and warps are powers of two")
    return config


def heuristic(positions: int, vocab: int) -> Config:
    """The largest block of 1024 to 4096 tokens with which there are programs enough."""
    block = 4096
    while block > 1024 and positions * (vocab // block) < PROGRAMS:
        block //= 2
    return Config(block=block, warps=8 if block > 2048 else 4)


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
    out[block, at, :] = shared.beside(found, places)
    tokens[block, at, :] = shared.beside(who, places)
