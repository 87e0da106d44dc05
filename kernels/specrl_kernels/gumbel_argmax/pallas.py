"""The perturbed argmax for TPUs: a Pallas kernel that Mosaic compiles.

A grid step is one block of the vocabulary at a few positions, a register's sublanes of them; tokens
lie along the lanes. Steps do not depend on each other.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specrl_kernels.dispatch import Target, Unsupported, configured
from specrl_kernels.gumbel_argmax import block as shared
from specrl_kernels.gumbel_argmax.drawn import Drawn, Threshold, combine, first_id

NAME = "pallas"
SUBLANES = {4: 8, 2: 16}  # rows of a register, by bytes of a logit


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters; none changes the result beyond rounding."""

    block: int = 2048  # tokens of a step; a multiple of 128


def gumbel_argmax_pallas(logits: jax.Array, temperature: jax.Array, key: jax.Array,
                         position: jax.Array, threshold: Threshold | None, *, count: int,
                         axis: str | None, target: Target) -> Drawn:
    """See `api.gumbel_argmax`."""
    w, vocab = logits.shape
    config = _config(target, logits, count)
    lanes, size = shared.width(count), min(config.block, vocab)
    rows = min(SUBLANES[logits.dtype.itemsize], w)
    steps = -(-vocab // size)
    of_position = lambda n: pl.BlockSpec((rows, n), lambda i, j: (i, 0))  # noqa: E731
    output = pl.BlockSpec((1, rows, lanes), lambda i, j: (j, i, 0))
    at = shared.positions(temperature, key, position, threshold, first_id(vocab, axis))
    floats, tokens = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab, count=count, truncated=threshold is not None),
        out_shape=[jax.ShapeDtypeStruct((steps, w, lanes), dtype)
                   for dtype in (jnp.float32, jnp.int32)],
        grid=(-(-w // rows), steps), interpret=target.interpret, name="gumbel_argmax",
        cost_estimate=shared.estimate(logits, steps * lanes),
        in_specs=[pl.BlockSpec((rows, size), lambda i, j: (i, j)), of_position(shared.FLOATS),
                  of_position(shared.INTEGERS)],
        out_specs=[output, output],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )(logits, *at)
    return combine(shared.parts(floats, tokens, count, vocab, axis), temperature == 0,
                   None if threshold is None else threshold.kept_mass)


def _config(target: Target, logits: jax.Array, count: int) -> Config:
    """Returns the given configuration, or the tuned one, or the default.

    Raises:
      Unsupported: the given configuration is impossible.
    """
    found = shared.tuned(target, NAME, logits, count)
    config = configured(Config, found or {})
    if config.block < 128 or config.block % 128:
        raise Unsupported(f"{config}: block is a multiple of 128")
    return config


def _kernel(logits: Any, floats: Any, integers: Any, out: Any, tokens: Any, *, vocab: int,
            count: int, truncated: bool) -> None:
    """Computes one block at a few positions; memory beyond the vocabulary is arbitrary."""
    values = logits[...]
    ids = pl.program_id(1) * values.shape[1] + jax.lax.broadcasted_iota(
        jnp.int32, values.shape, 1)
    of_position, words = floats[...], integers[...]
    found, who = shared.race(
        values, ids, ids < vocab, [of_position[:, i : i + 1] for i in range(shared.FLOATS)],
        [words[:, i : i + 1] for i in range(shared.INTEGERS)], count, truncated)
    lanes = jax.lax.broadcasted_iota(jnp.int32, out.shape[1:], 1)
    out[0] = shared.side_by_side(found, lanes)
    tokens[0] = shared.side_by_side(who, lanes)
