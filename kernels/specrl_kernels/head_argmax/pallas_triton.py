"""The draw from a head for GPUs: a Pallas kernel that Triton compiles.

A program multiplies a block of the head with a tile of positions, makes the noise of its logits,
and keeps for each position what parts.py needs. Programs of one block lie side by side in the grid,
so that all but the first find its weights in the L2 cache. Triton wants powers of two: positions
are padded to tiles, features are added in steps that divide them, and the last block is moved back
to end where the vocabulary ends, its known part hidden.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specrl_kernels.dispatch import Target, Unsupported, configured
from specrl_kernels.gumbel_argmax import Drawn, first_id, scale_of
from specrl_kernels.head_argmax.parts import LOWEST, Parts, draw
from specrl_kernels.noise import exponential_of, row_words
from specrl_kernels.tree_attention.softmax import dot
from specrl_kernels.triton_call import triton_call

LEAST = 16  # of a side of a product on tensor cores
NOBODY = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; none changes the result beyond rounding."""

    block: int = 128  # tokens of a program; a power of two, at least 16
    tile: int = 16  # positions of a program; likewise
    depth: int = 64  # features multiplied at a time; likewise
    warps: int = 4
    stages: int = 4


def head_argmax_pallas_triton(hidden: jax.Array, head: jax.Array, temperature: jax.Array,
                              key: jax.Array, position: jax.Array, *, axis: str | None,
                              target: Target) -> Drawn:
    """See `api.head_argmax`."""
    (features, width), vocab = hidden.shape, head.shape[0]
    config = heuristic(features, width, vocab, head.dtype) if target.config is None else configured(
        Config, target.config)
    _check(config, features, vocab)
    first = jnp.broadcast_to(first_id(vocab, axis), (width,))
    columns = jnp.stack([*row_words(key, position), *(
        jax.lax.bitcast_convert_type(x, jnp.uint32) for x in (temperature, first))], 1)
    # Transposed, so that the layout of hidden states is the one in which XLA has one operation for
    # each norm of the layers before.
    hidden, columns = (jnp.pad(a, ((0, -width % config.tile), (0, 0)))
                       for a in (hidden.T.astype(head.dtype), columns))
    padded, blocks = hidden.shape[0], -(-vocab // config.block)
    part = jax.ShapeDtypeStruct((padded, blocks), jnp.float32)
    found = triton_call(
        functools.partial(_kernel, config=config), "head_argmax",
        (padded // config.tile, blocks),
        [part, jax.ShapeDtypeStruct(part.shape, jnp.int32), part, part, part],
        [hidden, columns, head], warps=config.warps, stages=config.stages,
        interpret=target.interpret)
    return draw(Parts(*(x[:width] for x in found)), scale_of(temperature)[1], axis)


def heuristic(features: int, width: int, vocab: int, dtype: Any) -> Config:
    """Returns a tile for up to 64 positions; float32 has no tensor cores at full precision, so
    small tiles, lest registers spill."""
    exact = jnp.dtype(dtype).itemsize == 4
    tile = min(max(LEAST, 1 << (width - 1).bit_length()), 32 if exact else 64)
    return Config(block=min(64 if exact else 128, 1 << (vocab.bit_length() - 1)), tile=tile,
                  depth=min(32 if exact else 64, features & -features),
                  warps=8 if tile > 32 else 4)


def _check(config: Config, features: int, vocab: int) -> None:
    """What Triton cannot do. Raises Unsupported."""
    if features % LEAST:
        raise Unsupported(f"{features} features: must be a multiple of {LEAST}")
    if vocab < max(LEAST, config.block):
        raise Unsupported(f"{vocab} tokens: at least {max(LEAST, config.block)}")
    for side in (config.block, config.tile, config.depth):
        if side < LEAST or side & (side - 1):
            raise Unsupported(f"{config}: block, tile and depth are powers of two, at least "
                              f"{LEAST}")
    if features % config.depth:
        raise Unsupported(f"{config}: depth must divide {features} features")
    if config.stages < 1 or config.warps < 1 or config.warps & (config.warps - 1):
        raise Unsupported(f"{config}: at least one stage; warps are a power of two")


def _kernel(hidden: Any, columns: Any, head: Any, best: Any, token: Any, score: Any, top: Any,
            total: Any, *, config: Config) -> None:
    """One block of the head with one tile of positions."""
    vocab, number = head.shape[0], pl.program_id(1)
    begin = jnp.minimum(number * config.block, vocab - config.block)
    rows, at = pl.ds(begin, config.block), pl.ds(pl.program_id(0) * config.tile, config.tile)

    def add(i: Any, logits: jax.Array) -> jax.Array:
        some = pl.ds(i * config.depth, config.depth)
        return logits + dot(head[rows, some], hidden[at, some], contract=1)

    shape = (config.block, config.tile)
    logits = jax.lax.fori_loop(0, head.shape[1] // config.depth, add,
                               jnp.zeros(shape, jnp.float32))
    first, second, temperature, start = (columns[at, i][None] for i in range(4))
    scale, greedy = scale_of(jax.lax.bitcast_convert_type(temperature, jnp.float32))
    own = begin + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    fresh, ids = own >= number * config.block, start.astype(jnp.int32) + own
    scores = jnp.where(fresh, logits * scale, LOWEST)
    perturbed = jnp.where(greedy, scores, scores - jnp.log(exponential_of(first, second, ids)))
    perturbed = jnp.where(fresh, perturbed, LOWEST)
    found = perturbed.max(0)
    chosen = jnp.where(perturbed == found[None], ids, NOBODY).min(0)
    some = chosen < NOBODY  # none equals a highest score that is not a number
    highest = scores.max(0)
    for ref, x in ((best, jnp.where(some, found, LOWEST)),
                   (token, jnp.where(some, chosen, ids.min(0))),
                   (score, jnp.where(ids == chosen[None], scores, LOWEST).max(0)),
                   (top, highest), (total, jnp.exp(scores - highest[None]).sum(0))):
        ref[at, number] = x
