"""What the GPU kernels share: sizes that Triton can do, block sizes, and the course of a call."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Target, Unsupported, configured
from specrl_kernels.tree_attention import packing, shared_prefix, softmax
from specrl_kernels.tree_attention.packing import Rows
from specrl_kernels.tree_attention.shared_prefix import Prefix

LEAST = 16  # of a side of a product on tensor cores
PROGRAMS = 512  # enough to fill 132 multiprocessors, a few on each
SPLIT_BLOCKS = 4  # blocks of context that a split is worth starting for


@dataclasses.dataclass(frozen=True)
class Config:
    """What may be tuned; none of it changes the result beyond rounding."""

    block: int = 64  # slots of context read at a time; a power of two, at least 16
    tile: int = 16  # queries of a program; likewise
    splits: int = 1  # programs that share a row's context
    warps: int = 4
    stages: int = 2


def tree_attention(attend: Callable[..., Any], name: str, q: jax.Array, row: jax.Array,
                   node: jax.Array, tree_k: jax.Array, tree_v: jax.Array, parent: jax.Array,
                   cache_k: tuple[jax.Array, ...], cache_v: tuple[jax.Array, ...],
                   length: jax.Array, slot: jax.Array | None, prefix: Prefix | None, *,
                   scale: float, window: int | None, target: Target) -> jax.Array:
    """See `api.tree_attention`; `attend` computes rows against segments, whole or as a Partial."""
    b, n, g, _ = tree_k.shape
    rows = packing.unpack(q, row, node, parent, g, length, window)
    check_sizes(rows, [k.shape[3] for k in (*cache_k, *([] if prefix is None else [prefix.k]))])
    config = choose(target, name, rows, sum(k.shape[3] for k in cache_k))
    slot = jnp.arange(b, dtype=jnp.int32) if slot is None else slot
    nodes = max(LEAST, 1 << (n - 1).bit_length())
    tree = (packing.by_head(tree_k, nodes), packing.by_head(tree_v, nodes))
    run = functools.partial(attend, config=config, scale=scale, interpret=target.interpret)
    if prefix is None and config.splits == 1:
        out = run(rows, tree, cache_k, cache_v, length, slot, whole=True)
    else:
        parts = [run(rows, tree, cache_k, cache_v, length, slot, whole=False)]
        if prefix is not None:
            members, which = shared_prefix.split_members(prefix, prefix.rows.shape[1])
            part = run(shared_prefix.regroup(rows, members, prefix.length), None, (prefix.k,),
                       (prefix.v,), prefix.length, which, whole=False)
            parts.append(shared_prefix.scatter(members, part, b))
        out = softmax.finish(softmax.combine(softmax.stack(parts))).astype(q.dtype)
    return packing.pack(out, row, node, n)


def check_sizes(rows: Rows, sizes: Sequence[int]) -> None:
    """What Triton cannot do. Raises Unsupported."""
    e = rows.queries.shape[3]
    if e < LEAST or e & (e - 1):
        raise Unsupported(f"heads of {e}: Triton needs a power of two, at least {LEAST}")
    if min(sizes) < LEAST:
        raise Unsupported(f"a segment of {min(sizes)} slots: at least {LEAST}")


def choose(target: Target, name: str, rows: Rows, context: int) -> Config:
    """The given configuration, or the tuned one, or the heuristic.

    Raises:
      Unsupported: the given one cannot be.
    """
    b, g, q, e = rows.queries.shape
    found = packing.tuned(target, name, rows, context)
    config = configured(Config, found) if found is not None else heuristic(
        b, g, q, e, context, rows.queries.dtype.itemsize)
    for side in (config.block, config.tile):
        if side < LEAST or side & (side - 1):
            raise Unsupported(f"{config}: block and tile are powers of two, at least {LEAST}")
    if config.splits < 1 or config.stages < 1:
        raise Unsupported(f"{config}: at least one split and one stage")
    if config.warps < 1 or config.warps & (config.warps - 1):
        raise Unsupported(f"{config}: warps are a power of two")
    return config


def heuristic(rows: int, heads: int, queries: int, size: int, context: int, itemsize: int = 2
              ) -> Config:
    """One tile where the queries fit in it, and as many splits as fill the device.

    float32 has no tensor cores at full precision: small tiles over more threads, lest registers
    spill.
    """
    exact = itemsize == 4
    tile = min(max(LEAST, 1 << (queries - 1).bit_length()), 32 if exact else 64)
    block = 32 if exact or size > 128 else 64
    programs = rows * heads * -(-queries // tile)
    most = max(1, context // (SPLIT_BLOCKS * block))
    return Config(block=block, tile=tile, splits=min(most, -(-PROGRAMS // programs)),
                  warps=8 if exact or tile * size > 64 * 128 else 4)


def share(length: Any, oldest: Any, split: Any, config: Config) -> tuple[Any, Any]:
    """Places [low, high) that a split reads: whole blocks, from the first that the row sees."""
    begin = oldest // config.block * config.block
    blocks = (jnp.maximum(length - begin, 0) + config.block - 1) // config.block
    size = (blocks + config.splits - 1) // config.splits * config.block
    low = jnp.minimum(begin + split * size, length)
    return low, jnp.minimum(low + size, length)


def block_of(size: int, config: Config) -> int:
    """The largest power of two that fits into a segment, at most the configured block."""
    return min(config.block, 1 << (size.bit_length() - 1))
