"""Tree attention for GPUs: a Pallas kernel that Triton compiles.

One program is a tile of one row's queries to one key-value head, over one share of that row's
context (gpu.divide): so one long row still fills the device, however many dead or short ones lie
beside it. The programs of a row that has several shares leave partial results, which a second
kernel joins; that of a row with one share writes the result itself. Each program walks all segments
of the cache in loops whose bounds come from `length`, so there is one softmax, and what no query
sees is not read. Keys are read as [E, T] and values as [T, E], the way they lie. Triton wants
powers of two: queries are padded to tiles, and the last block of a segment is moved back to end
where the segment ends, its known part hidden.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specrl_kernels.tree_attention import gpu, packing, softmax
from specrl_kernels.tree_attention.ancestry import is_visible
from specrl_kernels.tree_attention.gpu import Config
from specrl_kernels.tree_attention.operands import Context
from specrl_kernels.tree_attention.packing import Rows
from specrl_kernels.tree_attention.softmax import Partial
from specrl_kernels.triton_call import triton_call


def tree_attention_pallas_triton(*args: Any, **options: Any) -> jax.Array:
    """See `api.tree_attention`."""
    return gpu.tree_attention(_attend, *args, **options)


def _attend(rows: Rows, tree: tuple[jax.Array, jax.Array] | None, context: Context, *,
            config: Config, scale: float, interpret: bool, whole: bool) -> Any:
    """Returns f[B, G, Q, E], or a Partial of it if not `whole`."""
    queries = rows.live.shape[1]
    rows = packing.pad_queries(rows, config.tile)
    b, g, padded, e = rows.queries.shape
    shares, live = gpu.shares_of(rows, context.length, config)
    first = jnp.zeros(rows.live.shape, jnp.int32) if rows.first is None else rows.first
    inputs = [rows.queries, *(rows.words[..., i] for i in range(rows.words.shape[2])), first, live,
              *shares, context.slot, *(tree or ()), *context.k, *context.v]
    split = config.splits > 1
    outputs = [jax.ShapeDtypeStruct((b, g, padded, e), rows.queries.dtype)] if whole else []
    if split or not whole:
        outputs += [jax.ShapeDtypeStruct((shares.row.shape[0], g, padded, width), jnp.float32)
                    for width in (1, 1, e)]
    call = functools.partial(triton_call, warps=config.warps, interpret=interpret)
    kernel = functools.partial(
        _kernel, words=rows.words.shape[2], segments=len(context.k), config=config, scale=scale,
        has_tree=tree is not None, has_window=rows.first is not None, whole=whole)
    tiles = g * padded // config.tile
    out = call(kernel, "tree_attention", (tiles, shares.row.shape[0]), outputs, inputs,
               stages=config.stages)
    if split:
        joined = outputs[:1] if whole else [
            jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in outputs]
        out = call(functools.partial(_join, tile=config.tile, whole=whole), "tree_attention_join",
                   (g * padded // gpu.JOIN_QUERIES, b), joined,
                   [shares.first, shares.count, live, *out], stages=1,
                   aliases={3: 0} if whole else None)
    out = [x[:, :, :queries] for x in out]
    return out[0] if whole else Partial(*out)


def _kernel(q: Any, *refs: Any, words: int, segments: int, config: Config, scale: float,
            has_tree: bool, has_window: bool, whole: bool) -> None:
    """One tile of queries to one head, over one share of the context."""
    bits, (first, live), refs = refs[:words], refs[words : words + 2], refs[words + 2 :]
    (owner, lows, highs, begins, counts, slot), refs = refs[:6], refs[6:]
    tree, refs = (refs[:2], refs[2:]) if has_tree else (None, refs)
    keys, values, outputs = refs[:segments], refs[segments : 2 * segments], refs[2 * segments :]
    tiles = q.shape[2] // config.tile
    head, tile = pl.program_id(0) // tiles, pl.program_id(0) % tiles
    share = pl.program_id(1)
    row = owner[share]
    at = pl.ds(tile * config.tile, config.tile)

    @pl.when(live[row, tile] > 0)
    def _() -> None:
        query = q[row, head, at, :]
        partial = softmax.empty(*query.shape)
        if has_tree:
            seen = [ref[row, at].reshape(config.tile, 1) for ref in bits]
            partial = _add_tree(partial, query, seen, tree, row, head, begins[row] == share, scale)
        low, high = lows[share], highs[share]
        lowest = first[row, at].reshape(config.tile, 1) if has_window else None
        start = 0
        for k, v in zip(keys, values, strict=True):
            add = functools.partial(_add_block, query, k, v, slot[row], head, start,
                                    low, high, lowest, config, scale)
            size = k.shape[3]
            block = gpu.block_of(size, config)
            begin = jnp.clip(low - start, 0, size) // block
            end = (jnp.clip(high - start, 0, size) + block - 1) // block
            partial = jax.lax.fori_loop(begin, end, add, partial)
            start += size
        if whole and config.splits == 1:
            _write(outputs[:1], partial, row, head, at)
        elif whole:
            alone = counts[row] == 1
            pl.when(alone)(lambda: _write(outputs[:1], partial, row, head, at))
            pl.when(~alone)(lambda: _write(outputs[1:], partial, share, head, at))
        else:
            _write(outputs, partial, row if config.splits == 1 else share, head, at)


def _join(begins: Any, counts: Any, live: Any, *refs: Any, tile: int, whole: bool) -> None:
    """Joins the shares of one row, for a few queries to one head.

    If `whole`, a row of one share has its result already, in the memory of the output.
    """
    parts, outputs = (refs[1:4], refs[4:]) if whole else (refs[:3], refs[3:])
    shares, _, queries, size = parts[2].shape
    lines = queries // gpu.JOIN_QUERIES
    head, line, row = pl.program_id(0) // lines, pl.program_id(0) % lines, pl.program_id(1)
    at = pl.ds(line * gpu.JOIN_QUERIES, gpu.JOIN_QUERIES)
    count = jnp.where(live[row, line * gpu.JOIN_QUERIES // tile] > 0, counts[row], 0)
    some = min(gpu.JOIN_SHARES, 1 << (shares.bit_length() - 1))

    @pl.when(count > int(whole))
    def _() -> None:
        begin = begins[row]

        def add(i: Any, partial: Partial) -> Partial:
            low = begin + i * some
            start = jnp.minimum(low, shares - some)
            number = start + jax.lax.broadcasted_iota(jnp.int32, (some, 1, 1), 0)
            mine = (number >= low) & (number < begin + count)
            return softmax.join(partial, softmax.combine(Partial(*(
                jnp.where(mine, ref[pl.ds(start, some), head, at, :], nothing)
                for ref, nothing in zip(parts, (softmax.FLOOR, 0.0, 0.0), strict=True)))))

        empty = softmax.empty(gpu.JOIN_QUERIES, size)
        partial = jax.lax.fori_loop(0, (count + some - 1) // some, add, empty)
        _write(outputs, partial, row, head, at)


def _add_tree(partial: Partial, query: Any, words: list[Any], tree: Any, row: Any, head: Any,
              mine: Any, scale: float) -> Partial:
    """The tree's own keys, in a row's first share alone."""
    keys, values = (ref[row, head, :, :] for ref in tree)
    score = softmax.dot(query, keys, contract=1) * scale
    columns = jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
    return softmax.add_keys(partial, score, is_visible(words, columns) & mine, values)


def _add_block(query: Any, k: Any, v: Any, slot: Any, head: Any, start: int, low: Any, high: Any,
               lowest: Any, config: Config, scale: float, index: Any, partial: Partial) -> Partial:
    """Adds block `index` of a segment that begins at place `start`."""
    size = k.shape[3]
    block = gpu.block_of(size, config)
    begin = jnp.minimum(index * block, size - block)  # the last block ends where the segment does
    rows = pl.ds(begin, block)
    score = softmax.dot(query, k[slot, head, :, rows]) * scale
    within = begin + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
    place = start + within
    visible = (within >= index * block) & (place >= low) & (place < high)
    if lowest is not None:
        visible &= place >= lowest
    return softmax.add_keys(partial, score, visible, v[slot, head, rows, :])


def _write(outputs: Any, partial: Partial, place: Any, head: Any, at: Any) -> None:
    if len(outputs) == 1:
        outputs[0][place, head, at, :] = softmax.finish(partial).astype(outputs[0].dtype)
        return
    for ref, x in zip(outputs, partial, strict=True):
        ref[place, head, at, :] = x
