"""The blocks of context that a TPU kernel reads, one grid step each, as lists of codes.

A grid over rows and blocks would pay a step for every block up to the longest row. The list holds
only what some live row sees, so dead rows, short rows and blocks older than a window cost nothing.
A code is row << 16 | block, with blocks counted over all segments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

SHIFT = 16
LOW = (1 << SHIFT) - 1
ROWS = 1 << 15  # rows, and cache rows, that a code in i32 has room for
NOTHING = LOW  # the block of a step that reads no context


class WorkList(NamedTuple):
    """T is the most steps that there may be, `count` of which are used."""

    count: jax.Array  # i32[]
    steps: jax.Array  # i32[T] code of each step
    fetch: tuple[jax.Array, ...]  # i32[T] for each segment: cache row << 16 | block of the segment


def blocks_of(sizes: Sequence[int], block: int) -> list[int]:
    """Blocks in each segment."""
    return [-(-size // min(block, size)) for size in sizes]


def most_steps(batch: int, sizes: Sequence[int], block: int) -> int:
    """T: the steps of a batch whose rows all read everything."""
    return batch * sum(blocks_of(sizes, block))


def make(length: jax.Array, low: jax.Array, live: jax.Array, slot: jax.Array,
         sizes: Sequence[int], block: int) -> WorkList:
    """Lists the blocks between `low` and `length` of the live rows.

    A live row has at least one step, in which its tree is read. A segment's fetch stays at its last
    block while other segments are read, so that nothing is fetched twice or in vain.

    Args:
      length: i32[B].
      low: i32[B] slot below which a row sees nothing.
      live: bool[B].
      slot: i32[B] cache row of each row.
      sizes: slots of each segment.
      block: slots of a block; a shorter segment is one block.
    """
    counts, offsets = [], []
    start = 0
    for size in sizes:
        t = min(block, size)
        end = -(-jnp.clip(length - start, 0, size) // t)
        begin = jnp.minimum(jnp.clip(low - start, 0, size) // t, end)
        counts.append(end - begin)
        offsets.append(begin)
        start += size
    counts, offsets = jnp.stack(counts), jnp.stack(offsets)  # [segments, B]
    used = jnp.where(live, jnp.maximum(counts.sum(0), 1), 0)
    row, within = _rows(used, most_steps(length.shape[0], sizes, block))
    ends = jnp.cumsum(counts, 0)[:, row]  # [segments, T]
    segment = jnp.minimum((within[None] >= ends).sum(0), len(sizes) - 1)
    before = jnp.where(segment > 0, jnp.take_along_axis(ends, segment[None] - 1, 0)[0], 0)
    local = within - before + offsets[segment, row]
    firsts = jnp.cumsum(jnp.asarray([0, *blocks_of(sizes, block)[:-1]]))
    reads = counts.sum(0)[row] > 0
    steps = row << SHIFT | jnp.where(reads, firsts[segment] + local, NOTHING)
    here = slot[row] << SHIFT | local
    reads &= jnp.arange(row.shape[0]) < used.sum()
    fetch = tuple(_held(here, reads & (segment == i)) for i in range(len(sizes)))
    return WorkList(used.sum().astype(jnp.int32), steps.astype(jnp.int32), fetch)


def _rows(used: jax.Array, total: int) -> tuple[jax.Array, jax.Array]:
    """(row, index within the row) of every step; those beyond the last repeat the last row."""
    row = jnp.repeat(jnp.arange(used.shape[0]), used, total_repeat_length=total)
    begins = jnp.cumsum(used) - used
    return row, jnp.arange(total) - begins[row]


def _held(code: jax.Array, own: jax.Array) -> jax.Array:
    """Returns the code of the last own step, before it of the first one; 0 if there is none."""
    step = jnp.arange(code.shape[0])
    last = jax.lax.cummax(jnp.where(own, step, -1))
    at = jnp.where(last < 0, jnp.argmax(own), last)
    return jnp.where(own.any(), code[at], 0).astype(jnp.int32)
