"""Code that the GPU kernels share: block sizes, and the steps of a call.

One program is one block of the vocabulary at one position. Triton wants powers of two: the last
block is moved back to end where the vocabulary ends, and what the block before it had is hidden.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Target, Unsupported, configured
from specrl_kernels.gumbel_argmax import block as shared
from specrl_kernels.gumbel_argmax.drawn import Drawn, Threshold, combine, first_id

PROGRAMS = 512  # enough to fill 132 multiprocessors, a few on each


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters; none changes the result beyond rounding."""

    block: int = 1024  # tokens of a program; a power of two
    warps: int = 4


def gumbel_argmax(race: Callable[..., Any], name: str, logits: jax.Array, temperature: jax.Array,
                  key: jax.Array, position: jax.Array, threshold: Threshold | None, *, count: int,
                  axis: str | None, target: Target) -> Drawn:
    """See `api.gumbel_argmax`; `race` computes what blocks write (`block.parts`)."""
    w, vocab = logits.shape
    config = choose(target, name, logits, count)
    lanes, size = shared.width(count), min(config.block, 1 << (vocab.bit_length() - 1))
    outputs = [jax.ShapeDtypeStruct((-(-vocab // size), w, lanes), dtype)
               for dtype in (jnp.float32, jnp.int32)]
    at = shared.positions(temperature, key, position, threshold, first_id(vocab, axis))
    floats, tokens = race([logits, *at], outputs, size=size, count=count,
                          truncated=threshold is not None, config=config,
                          interpret=target.interpret)
    return combine(shared.parts(floats, tokens, count, vocab, axis), temperature == 0,
                   None if threshold is None else threshold.kept_mass)


def choose(target: Target, name: str, logits: jax.Array, count: int) -> Config:
    """Returns the given configuration, or the tuned one, or that of the heuristic.

    Raises:
      Unsupported: the given configuration is impossible.
    """
    found = shared.tuned(target, name, logits, count)
    config = configured(Config, found) if found is not None else heuristic(*logits.shape)
    if any(x < 1 or x & (x - 1) for x in (config.block, config.warps)):
        raise Unsupported(f"{config}: block and warps are powers of two")
    return config


def heuristic(positions: int, vocab: int) -> Config:
    """Returns the largest block of 1024 to 4096 tokens that leaves enough programs."""
    block = 4096
    while block > 1024 and positions * (vocab // block) < PROGRAMS:
        block //= 2
    return Config(block=block, warps=8 if block > 2048 else 4)
