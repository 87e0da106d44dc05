"""The body of the TPU kernel: one step of the work list, see pallas.py."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specrl_kernels.tree_attention import softmax, work_list
from specrl_kernels.tree_attention.ancestry import is_visible
from specrl_kernels.tree_attention.softmax import Partial

COPIES = 16  # of a tree's only node
UNROLLED = 32  # bodies of the loops over segments, heads and tiles that are written out


def kernel(total: Any, part: Any, layer: Any, steps: Any, length: Any, live: Any, *refs: Any,
           sizes: tuple[int, ...], block: int, splits: int, tile: int, scale: float,
           has_tree: bool, has_window: bool) -> None:
    """Runs one step of the list: starts a row, adds one block to it, ends it, each where due."""
    q, info, *rest = refs[len(sizes):]  # the fetch lists are for the index maps
    tree, rest = (rest[:2], rest[2:]) if has_tree else (None, rest)
    context, rest = rest[: 2 * len(sizes)], rest[2 * len(sizes):]
    outputs, carry = rest[:-3], Partial(*rest[-3:])
    del layer  # it is for the index maps
    split, count, share = pl.program_id(0), total[0], part[0]
    at = split * share + pl.program_id(1)
    last = jnp.minimum((split + 1) * share, count) - 1
    _, heads, queries, _ = q.shape
    tiles = queries // tile
    blocks = work_list.blocks_of(sizes, block)
    unrolled = is_unrolled(sizes, heads, tiles)

    @pl.when(at <= last)
    def _() -> None:
        code = steps[at]
        row, at_block = code >> work_list.SHIFT, code & work_list.LOW
        opens = (at == 0) | (steps[jnp.maximum(at - 1, 0)] >> work_list.SHIFT != row)
        closes = (at == last) | (steps[jnp.minimum(at + 1, last)] >> work_list.SHIFT != row)
        each = functools.partial(_each_live_tile, live, row, heads, tiles, tile, unrolled)
        begin = functools.partial(_begin, carry, q, info, tree, scale)
        if has_tree:
            pl.when(opens)(lambda: each(begin))
        if splits > 1 or not has_tree:
            fresh = (at == split * share) & ~opens if has_tree else (at == split * share) | opens
            pl.when(fresh)(lambda: each(functools.partial(_clear, carry)))
        start, first = 0, 0
        for i, (size, count) in enumerate(zip(sizes, blocks, strict=True)):
            t = min(block, size)
            place = start + (at_block - first) * t
            own = (at_block >= first) & (at_block < first + count) & (place < length[row])
            end = jnp.minimum(length[row], start + size)
            add = functools.partial(_add_block, carry, q, info, *context[2 * i : 2 * i + 2], scale,
                                    place, end, size % t > 0, has_window)
            pl.when(own)(functools.partial(each, add))
            start, first = start + size, first + count
        pl.when(closes)(lambda: each(functools.partial(_end, carry, outputs)))


def is_unrolled(sizes: Sequence[int], heads: int, tiles: int) -> bool:
    """Returns whether a step's loops over heads and tiles are written out."""
    return len(sizes) * heads * tiles <= UNROLLED


def _each_live_tile(live: Any, row: Any, heads: int, tiles: int, tile: int, unrolled: bool,
                    body: Any) -> None:
    """Calls body(head, slice of queries) for the tiles that hold a live query.

    All heads of a tile are in one region, so that the compiler overlaps their work.
    """
    def if_live(at: Any, run_heads: Any) -> None:
        begin = at * tile if isinstance(at, int) else pl.multiple_of(at * tile, tile)
        pl.when(live[row * tiles + at] > 0)(lambda: run_heads(pl.ds(begin, tile)))

    def written_out(queries: Any) -> None:
        for head in range(heads):
            body(head, queries)

    def in_a_loop(queries: Any) -> None:
        jax.lax.fori_loop(0, heads, lambda head, _: body(head, queries), None)

    if unrolled:
        for at in range(tiles):
            if_live(at, written_out)
    else:
        jax.lax.fori_loop(0, tiles, lambda at, _: if_live(at, in_a_loop), None)


def _read(carry: Partial, head: Any, queries: Any) -> Partial:
    return Partial(*(ref[head, queries, :] for ref in carry))


def _write(carry: Partial, head: Any, queries: Any, partial: Partial) -> None:
    for ref, x in zip(carry, partial, strict=True):
        ref[head, queries, :] = x


def _clear(carry: Partial, head: Any, queries: Any) -> None:
    _write(carry, head, queries, softmax.empty(queries.size, carry.out.shape[2]))


def _begin(carry: Partial, q: Any, info: Any, tree: Any, scale: float, head: Any, queries: Any
           ) -> None:
    """The tree's own keys: the first that a row sees."""
    keys, values = (ref[0, head] for ref in tree)  # [n, E]
    if keys.shape[0] == 1:  # Mosaic has no product of one column; nobody sees the copies
        keys, values = (jnp.broadcast_to(x, (COPIES, x.shape[1])) for x in (keys, values))
    score = softmax.dot(q[0, head, queries, :], keys, contract=1) * scale
    columns = jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
    words = info[0, queries, :]
    visible = is_visible([words[:, i : i + 1] for i in range(words.shape[1] - 1)], columns)
    nothing = softmax.empty(*carry.out[head, queries, :].shape)
    _write(carry, head, queries, softmax.add_keys(nothing, score, visible, values))


def _add_block(carry: Partial, q: Any, info: Any, k: Any, v: Any, scale: float, place: Any,
               end: Any, ragged: bool, has_window: bool, head: Any, queries: Any) -> None:
    """Adds a block of context that begins at `place`, up to `end`.

    Where the last block of a segment is `ragged`, it reaches beyond the array, and what lies there
    may be NaN, which a weight of 0 does not hide.
    """
    score = softmax.dot(q[0, head, queries, :], k[0, 0, head]) * scale
    positions = place + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
    visible = positions < end
    if has_window:
        words = info[0, queries, :]
        visible &= positions >= words[:, words.shape[1] - 1 :]
    values = v[0, 0, head]  # [E, T]
    if ragged:
        inside = place + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < end
        values = jnp.where(inside, values.astype(jnp.float32), 0).astype(values.dtype)
    partial = softmax.add_keys(_read(carry, head, queries), score, visible, values, contract=1)
    _write(carry, head, queries, partial)


def _end(carry: Partial, outputs: Any, head: Any, queries: Any) -> None:
    partial = _read(carry, head, queries)
    if len(outputs) == 1:
        outputs[0][0, 0, head, queries, :] = softmax.finish(partial).astype(outputs[0].dtype)
        return
    for ref, x in zip(outputs, partial, strict=True):
        ref[0, 0, head, queries, :] = x
