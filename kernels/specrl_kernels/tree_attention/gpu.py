"""What the GPU kernels share: sizes that Triton can do, block sizes, and the course of a call."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Target, Unsupported, configured
from specrl_kernels.tree_attention import packing, shared_prefix, softmax
from specrl_kernels.tree_attention.operands import Context, Operands
from specrl_kernels.tree_attention.packing import Rows

LEAST = 16  # of a side of a product on tensor cores
GROUP_TILE = 128  # queries of a program that reads a shared prefix, with heads of 128
JOIN_QUERIES, JOIN_SHARES = 4, 16  # of a program that joins, at a time: their loads overlap
PROGRAMS = 512  # enough to fill 132 multiprocessors, a few on each


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; none changes the result beyond rounding."""

    block: int = 64  # slots of context read at a time; a power of two, at least 16
    tile: int = 16  # queries of a program; likewise
    splits: int = 1  # shares that the context of all live rows is divided into, or a few more
    least: int = 4  # blocks of a share, at least
    warps: int = 4
    stages: int = 2


def tree_attention(attend: Callable[..., Any], operands: Operands, *, scale: float,
                   window: int | None, target: Target) -> jax.Array:
    """See `api.tree_attention`; `attend` computes rows against a context, whole or as a Partial."""
    b, n, g, _ = operands.tree_k.shape
    prefix, context = operands.prefix, operands.context
    rows = packing.unpack(operands, g, window)
    sizes = [k.shape[3] for k in context.k]
    check_sizes(rows, sizes if prefix is None else [*sizes, prefix.k.shape[3]])
    config = choose(target, rows, sum(sizes))
    nodes = max(LEAST, 1 << (n - 1).bit_length())
    tree = (packing.by_head(operands.tree_k, nodes), packing.by_head(operands.tree_v, nodes))
    run = functools.partial(attend, config=config, scale=scale, interpret=target.interpret)
    out = run(rows, tree, context, whole=prefix is None)
    if prefix is not None:
        grouped = shared_prefix.regroup(rows, prefix.rows, prefix.length)
        which = jnp.arange(len(prefix.rows), dtype=jnp.int32)
        part = run(grouped, None, Context((prefix.k,), (prefix.v,), prefix.length, which),
                   whole=False, config=for_groups(config, grouped))
        both = softmax.stack([out, shared_prefix.scatter(prefix.rows, part, b)])
        out = softmax.finish(softmax.combine(both)).astype(operands.q.dtype)
    return packing.pack(out, operands.row, operands.node, n)


def check_sizes(rows: Rows, sizes: Sequence[int]) -> None:
    """What Triton cannot do. Raises Unsupported."""
    e = rows.queries.shape[3]
    if e < LEAST or e & (e - 1):
        raise Unsupported(f"heads of {e}: Triton needs a power of two, at least {LEAST}")
    if min(sizes) < LEAST:
        raise Unsupported(f"a segment of {min(sizes)} slots: at least {LEAST}")


def choose(target: Target, rows: Rows, context: int) -> Config:
    """Returns the given configuration, else the heuristic's.

    Raises:
      Unsupported: the given one is impossible.
    """
    config = heuristic(rows.queries, context) if target.config is None else configured(
        Config, target.config)
    for side in (config.block, config.tile):
        if side < LEAST or side & (side - 1):
            raise Unsupported(f"{config}: block and tile are powers of two, at least {LEAST}")
    if min(config.splits, config.least, config.stages) < 1:
        raise Unsupported(f"{config}: at least one split, one block of it and one stage")
    if config.warps < 1 or config.warps & (config.warps - 1):
        raise Unsupported(f"{config}: warps are a power of two")
    return config


def heuristic(queries: jax.Array, context: int) -> Config:
    """Returns one tile where the queries f[B, G, Q, E] fit in it, and shares that fill the device.

    The number of shares does not depend on the rows, of which any may be dead: `divide` looks at
    live ones. float32 has no tensor cores at full precision: small tiles over more threads, lest
    registers spill; heads of 256 have more threads, too.
    """
    rows, heads, each, size = queries.shape
    exact = queries.dtype.itemsize == 4
    tile = min(max(LEAST, 1 << (each - 1).bit_length()), 32 if exact else 64)
    block = 32 if exact or size > 128 else 64
    wanted = -(-PROGRAMS // (heads * -(-each // tile)))
    limit = max(1, rows * (context // (Config.least * block)))
    alone = context < 2 * Config.least * block  # no row is long enough for two shares
    return Config(block=block, tile=tile, splits=1 if alone else min(limit, wanted),
                  warps=8 if exact or size > 128 else 4)


def for_groups(config: Config, rows: Rows) -> Config:
    """With a tile for the queries of all rows that share a prefix, as far as registers hold it.

    One program then reads a prefix, or its share of it, once for all of them. A group of more
    queries has several tiles, which lie side by side in the grid, so that they run at about the
    same time and all but the first find what they read in the L2 cache.
    """
    queries, size = rows.queries.shape[2:]
    exact = rows.queries.dtype.itemsize == 4
    limit = 32 if exact else min(GROUP_TILE, GROUP_TILE * 128 // size)
    tile = min(max(LEAST, 1 << (queries - 1).bit_length()), max(limit, config.tile))
    return dataclasses.replace(
        config, tile=tile, warps=max(config.warps, 8 if tile > 64 or size > 128 else 1))


class Shares(NamedTuple):
    """What each program of a head and tile reads; a row's shares lie together, in order.

    S is B + splits - 1, or B if nothing is split.
    """

    row: jax.Array  # i32[S] whose context it is; B, and so a dead row, where no share is left
    low: jax.Array  # i32[S] the positions [low, high) of the row's context
    high: jax.Array  # i32[S]
    first: jax.Array  # i32[B] the first share of each row
    count: jax.Array  # i32[B] how many it has, 0 if it is dead


def divide(length: jax.Array, oldest: jax.Array, live: jax.Array, config: Config) -> Shares:
    """Divides the context of the live rows into `splits` shares of about the same size.

    A row that is longer than a share is read by several programs: one long row among short or dead
    ones by nearly all of them, and rows of one length by equally many. So the sizes, and with them
    the last bits of a result, depend on all rows; with splits = 1 on each row alone.

    Args:
      length, oldest: i32[B] a row sees the positions [oldest, length).
      live: bool[B]; a live row has a share even if it sees nothing but its tree.
    """
    b, block = length.shape[0], config.block
    begin = oldest // block * block
    blocks = jnp.where(live, -(-jnp.maximum(length - begin, 0) // block), 0)
    if config.splits == 1:
        size = jnp.maximum(blocks, 1)
    else:
        size = jnp.maximum(-(-blocks.sum() // config.splits), config.least)
    count = jnp.where(live, jnp.maximum(-(-blocks // size), 1), 0)
    ends = jnp.cumsum(count)
    each = -(-blocks // jnp.maximum(count, 1)) * block
    number = jnp.arange(b + config.splits - 1)
    row = (ends[None] <= number[:, None]).sum(1, dtype=jnp.int32)  # B beyond the last
    there = jnp.minimum(row, b - 1)
    low = jnp.minimum(begin[there] + (number - ends[there] + count[there]) * each[there],
                      length[there])
    return Shares(row, low, jnp.minimum(low + each[there], length[there]),
                  (ends - count).astype(jnp.int32), count)


def shares_of(rows: Rows, length: jax.Array, config: Config) -> tuple[Shares, jax.Array]:
    """(the shares, which tiles are live i32[B + 1, Q / tile]); the row beyond the last is dead."""
    live = packing.live_tiles(rows, config.tile)
    return (divide(length, packing.oldest(rows), live.any(1), config),
            jnp.pad(live, ((0, 1), (0, 0))))


def block_of(size: int, config: Config) -> int:
    """The largest power of two that fits into a segment, at most the configured block."""
    return min(config.block, 1 << (size.bit_length() - 1))
