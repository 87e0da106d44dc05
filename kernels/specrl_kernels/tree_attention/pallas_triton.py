"""Tree attention for GPUs: a Pallas kernel that Triton compiles.

One program is a tile of one row's queries to one key-value head, and with `splits` a share of that
row's context: so one long row still fills the device, and the shares are combined afterwards. Each
program walks all segments of the cache in loops whose bounds come from `length`, so there is one
softmax, and what no query sees is not read. Keys are read as [E, T] and values as [T, E], the way
they lie. Triton wants powers of two: queries are padded to tiles, and the last block of a segment
is moved back to end where the segment ends, its known part hidden.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specrl_kernels.dispatch import Target
from specrl_kernels.tree_attention import gpu, packing, softmax
from specrl_kernels.tree_attention.ancestry import is_visible
from specrl_kernels.tree_attention.gpu import Config
from specrl_kernels.tree_attention.packing import Rows
from specrl_kernels.tree_attention.softmax import Partial
from specrl_kernels.triton_call import triton_call

NAME = "pallas_triton"


def tree_attention_pallas_triton(*args: Any, target: Target, **options: Any) -> jax.Array:
    """See `api.tree_attention`."""
    return gpu.tree_attention(_attend, NAME, *args, target=target, **options)


def _attend(rows: Rows, tree: tuple[jax.Array, jax.Array] | None, cache_k: Sequence[jax.Array],
            cache_v: Sequence[jax.Array], length: jax.Array, slot: jax.Array, *, config: Config,
            scale: float, interpret: bool, whole: bool) -> Any:
    """f[B, G, Q, E], or a Partial of it if not `whole`."""
    queries = rows.live.shape[1]
    rows = packing.pad_queries(rows, config.tile)
    b, g, padded, e = rows.queries.shape
    live = packing.live_tiles(rows, config.tile)
    first = jnp.zeros(rows.live.shape, jnp.int32) if rows.first is None else rows.first
    inputs = [rows.queries, *(rows.words[..., i] for i in range(rows.words.shape[2])), first, live,
              length, packing.oldest(rows), slot, *(tree or ()), *cache_k, *cache_v]
    shapes = [(b, g, padded, e)] if whole else [
        (config.splits, b, g, padded, width) for width in (1, 1, e)]
    dtype = rows.queries.dtype if whole else jnp.float32
    kernel = functools.partial(
        _kernel, words=rows.words.shape[2], segments=len(cache_k), config=config, scale=scale,
        has_tree=tree is not None, has_window=rows.first is not None)
    out = triton_call(kernel, "tree_attention", (g * padded // config.tile, b, config.splits),
                      [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes], inputs,
                      warps=config.warps, stages=config.stages, interpret=interpret)
    if whole:
        return out[0][:, :, :queries]
    return softmax.combine(Partial(*(x[:, :, :, :queries] for x in out)))


def _kernel(q: Any, *refs: Any, words: int, segments: int, config: Config, scale: float,
            has_tree: bool, has_window: bool) -> None:
    """One tile of queries to one head, over one share of the context."""
    bits, (first, live, length, oldest, slot), refs = refs[:words], refs[words:words + 5], refs[
        words + 5:]
    tree, refs = (refs[:2], refs[2:]) if has_tree else (None, refs)
    keys, values, outputs = refs[:segments], refs[segments : 2 * segments], refs[2 * segments :]
    tiles = q.shape[2] // config.tile
    head, tile = pl.program_id(0) // tiles, pl.program_id(0) % tiles
    row, split = pl.program_id(1), pl.program_id(2)
    at = pl.ds(tile * config.tile, config.tile)

    @pl.when(live[row, tile] > 0)
    def _() -> None:
        query = q[row, head, at, :]
        partial = softmax.empty(*query.shape)
        if has_tree:
            seen = [ref[row, at].reshape(config.tile, 1) for ref in bits]
            partial = _add_tree(partial, query, seen, tree, row, head, split == 0, scale)
        low, high = gpu.share(length[row], oldest[row] if has_window else 0, split, config)
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
        _write(outputs, partial, split, row, head, at)


def _add_tree(partial: Partial, query: Any, words: list[Any], tree: Any, row: Any, head: Any,
              mine: Any, scale: float) -> Partial:
    """The tree's own keys, in the first split alone."""
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


def _write(outputs: Any, partial: Partial, split: Any, row: Any, head: Any, at: Any) -> None:
    if len(outputs) == 1:
        outputs[0][row, head, at, :] = softmax.finish(partial).astype(outputs[0].dtype)
        return
    for ref, x in zip(outputs, partial, strict=True):
        ref[split, row, head, at, :] = x
