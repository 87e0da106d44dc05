"""Committed keys and values in the layout that suits a platform, behind one interface, `KV`.

A CPU holds segments of each layer, so that attention reads little more than the context. An
accelerator holds one array of keys and one of values for all layers: no loop or branch stands in a
layer, and a round writes to each array once.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from specrl_kernels.cache_append import cache_append
from specrl_kernels.tree_attention import plan, tree_attention

from specrl_jax.model.architecture import Architecture
from specrl_jax.model.layers import Index
from specrl_jax.model.rows import for_rows
from specrl_jax.model.transformer import Attend, LayerKV, Packing
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array

Segments: TypeAlias = tuple[list[Array], list[Array]]
"""k [B, G, E, s] and v [B, G, s, E] of one layer, each in segments along S."""
SEGMENT = 64  # slots of a CPU's cache come in multiples of this; measured
LANES = 128  # and an accelerator's


class KV(Protocol):
    """A cache's keys and values. Slots at and beyond a row's length hold garbage, never read."""

    def reader(self, arch: Architecture, packing: Packing, length: Array,
               implementation: str | None = None) -> Attend:
        """Returns attention of packed nodes to their rows' contexts and trees.

        Args:
          length: i32[B] slots of the contexts.
          implementation: of tree attention.
        """
        ...

    def append(self, new: Array, length: Array, count: Array) -> "KV":
        """Writes the first count[b] of new f[D+1, L, 2, G, E, B] to row b from slot length[b] on.

        All D + 1 fit into a row.
        """
        ...

    def fill(self, source: Array, fresh: LayerKV) -> "KV":
        """Writes prompts to the starts of rows b with source[b] >= 0, i32[B].

        `fresh` has [p, P'] in place of [W]: the keys and values of p prompts.
        """
        ...

    def copy(self, source: Array, width: int) -> "KV":
        """Copies the first `width` slots of row source[b] to row b, where source[b] >= 0."""
        ...

    def select(self, slots: Array) -> "KV":
        """Returns only the rows i32[B'], in that order."""
        ...


def shapes(platform: str, arch: Architecture, rows: int, slots: int, dtype: DTypeLike) -> KV:
    """Returns the cache of `rows` rows of at least `slots` slots, with shapes in place of arrays.

    `platform` is "cpu", "gpu" or "tpu".
    """
    g, e, layers = arch.num_kv_heads, arch.head_dim, arch.num_layers
    each: Any = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    if platform == "cpu":
        sizes = segments(slots)
        return SegmentedKV([([each((rows, g, e, s)) for s in sizes],
                             [each((rows, g, s, e)) for s in sizes]) for _ in range(layers)])
    size = -(-slots // LANES) * LANES
    k, v = (rows, layers, g, e, size), (rows, layers, g, size, e)
    transposed = platform == "tpu"
    return StackedKV(each(k), each(k if transposed else v), transposed)


def segments(slots: int) -> tuple[int, ...]:
    """Returns the sizes of the arrays of a layer's cache on a CPU.

    Attention reads a segment whole or not at all, so each is at most half of those before it: a
    long cache has few arrays, and a short context reads little more than itself.
    """
    total, sizes = -(-slots // SEGMENT) * SEGMENT, []
    while left := total - sum(sizes):
        sizes.append(min(left, max(SEGMENT, sum(sizes) // 2 // SEGMENT * SEGMENT)))
    return tuple(sizes)


def _attend(q: Array, fresh: tuple[Array, Array], packing: Packing, at: tuple[Any, Any],
            cached: tuple[Any, Any], length: Array, **options: Any) -> Array:
    g, r, e, w = q.shape
    (row, node), (cache_k, cache_v) = at, cached
    tree_k, tree_v = (packing.by_row(jnp.moveaxis(a, -1, 0)) for a in fresh)
    out = tree_attention(
        q.reshape(g * r, e, w).transpose(2, 0, 1), row, node, tree_k, tree_v, packing.parent,
        cache_k, cache_v, length, scale=e**-0.5, **options)
    return out.transpose(1, 2, 0).reshape(g, r, e, w)


class SegmentedKV(struct.PyTreeNode):
    """The cache of a CPU, in as many arrays as layers have segments."""

    layers: list[Segments]

    split = P(ROWS)  # of each array over the data axes

    def reader(self, arch: Architecture, packing: Packing, length: Array,
               implementation: str | None = None) -> Attend:
        def attend(index: Any, q: Array, k: Array, v: Array) -> Array:
            return _attend(q, (k, v), packing, (packing.row, packing.node), self.layers[index],
                           length, implementation=implementation)

        return attend

    def append(self, new: Array, length: Array, count: Array) -> "SegmentedKV":
        """Updates one slice at a time, because a CPU's scatter copies the whole cache
        (experiments/LOG.md).

        Entries are sorted by the segment they go to, and each segment has its own loop over its
        entries alone; plain decoding pays for one entry a row.
        """
        width = new.shape[0]
        sizes = [k.shape[3] for k in self.layers[0][0]]
        place = length[:, None] + jnp.arange(width)[None]
        within = jnp.arange(width)[None] < count[:, None]
        ends = jnp.cumsum(jnp.asarray(sizes))
        segment = jnp.where(within, (place[..., None] >= ends[None, None]).sum(-1), len(sizes))
        order = jnp.argsort(segment.reshape(-1), stable=True)
        bounds = (segment.reshape(-1)[None] < jnp.arange(len(sizes) + 1)[:, None]).sum(1)
        layers, start = [(list(k), list(v)) for k, v in self.layers], 0
        for i, size in enumerate(sizes):
            write = functools.partial(_write_entry, new, order, place.reshape(-1) - start)
            part = jax.lax.fori_loop(bounds[i], bounds[i + 1], write,
                                     [(k[i], v[i]) for k, v in layers])
            for (k, v), (new_k, new_v) in zip(layers, part, strict=True):
                k[i], v[i] = new_k, new_v
            start += size
        return SegmentedKV(layers)

    def fill(self, source: Array, fresh: LayerKV) -> "SegmentedKV":
        pairs = fresh if isinstance(fresh, list) else list(zip(*fresh, strict=True))
        rows = [(k.transpose(2, 0, 1, 3), v.transpose(2, 0, 3, 1)) for k, v in pairs]
        return self._write(source, rows, rows[0][0].shape[3])

    def copy(self, source: Array, width: int) -> "SegmentedKV":
        return self._write(source, None, width)

    def _write(self, source: Array, rows: list[tuple[Array, Array]] | None, width: int
               ) -> "SegmentedKV":
        """Overwrites `width` slots of rows from `rows` [p, ...], or if that is None from others."""
        def write(b: Array, at: Array, layers: list[Segments]) -> list[Segments]:
            return [_write_layer(b, at, of, None if rows is None else rows[i], width)
                    for i, of in enumerate(layers)]

        return SegmentedKV(for_rows(source, write, self.layers))

    def select(self, slots: Array) -> "SegmentedKV":
        return jax.tree.map(lambda a: a[slots], self)


def _write_entry(new: Array, order: Array, place: Array, step: Array,
                 kv: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Writes entry order[step] of the path into one segment of every layer."""
    zero, width, (g, e) = jnp.int32(0), new.shape[0], new.shape[3:5]
    entry = order[step].astype(jnp.int32)
    b, d, at = entry // width, entry % width, place[entry]
    out = []
    for layer, (k, v) in enumerate(kv):
        column, line = (jax.lax.dynamic_slice(new, (d, layer, i, 0, 0, b), (1, 1, 1, g, e, 1))
                        for i in (0, 1))
        out.append((
            jax.lax.dynamic_update_slice(k, column.reshape(1, g, e, 1), (b, zero, zero, at)),
            jax.lax.dynamic_update_slice(v, line.reshape(1, g, 1, e), (b, zero, at, zero))))
    return out


def _write_layer(b: Array, source: Array, segments: Segments, rows: tuple[Array, Array] | None,
                 width: int) -> Segments:
    out: Segments = ([], [])
    start = 0
    for i, k in enumerate(segments[0]):
        size = min(k.shape[3], width - start)
        for which, axis in ((0, 3), (1, 2)):
            whole = segments[which][i]
            if size > 0:
                new = (_positions(whole, source, 0, size, axis) if rows is None
                       else _positions(rows[which], source, start, size, axis))
                whole = jax.lax.dynamic_update_slice(whole, new, (b, *(jnp.int32(0),) * 3))
            out[which].append(whole)
        start += k.shape[3]
    return out


def _positions(a: Array, row: Array, start: int, size: int, axis: int) -> Array:
    """Returns row `row` of a [rows, G, ., .], cut to `size` positions along `axis`."""
    begin, shape = [row, 0, 0, 0], [1, *a.shape[1:]]
    begin[axis], shape[axis] = start, size
    return jax.lax.dynamic_slice(a, [jnp.int32(x) for x in begin], shape)


class StackedKV(struct.PyTreeNode):
    """The cache of an accelerator, in two arrays.

    Rows come first, because a TPU updates slices of rows where they are the outermost axis.
    """

    k: Array  # f[B, L, G, E, S]
    v: Array  # f[B, L, G, S, E], as Triton reads it; if transposed f[B, L, G, E, S], as Mosaic does
    transposed: bool = struct.field(pytree_node=False)

    split = P(ROWS, None)  # of each array over the data axes

    def reader(self, arch: Architecture, packing: Packing, length: Array,
               implementation: str | None = None) -> Attend:
        at = (None, None) if packing.in_order else (packing.row, packing.node)
        q = jax.ShapeDtypeStruct((packing.row.size, arch.num_heads, arch.head_dim), self.k.dtype)
        shared = plan(q, *at, packing.parent, self.k, length, implementation=implementation)
        if self.transposed:  # else libtpu makes constants of the plan anew in every layer
            shared = jax.lax.optimization_barrier(shared)

        def attend(index: Index, q: Array, k: Array, v: Array) -> Array:
            return _attend(q, (k, v), packing, at, (self.k, self.v), length, layer=index,
                           plan=shared, transposed_v=self.transposed,
                           implementation=implementation)

        return attend

    def append(self, new: Array, length: Array, count: Array) -> "StackedKV":
        if self.transposed:
            k, v = cache_append((self.k, self.v), new, length, count)
            return self.replace(k=k, v=v)
        within = jnp.arange(new.shape[0])[:, None] < count[None]
        new = jnp.where(within[:, None, None, None, None], new, 0)

        def write(whole: Array, new: Array, axis: int) -> Array:
            return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(
                row, new, at, axis - 1))(whole, new, length)

        return self._map(write, *(new[:, :, i].transpose(4, 1, 2, 3, 0) for i in (0, 1)))

    def fill(self, source: Array, fresh: LayerKV) -> "StackedKV":
        k, v = (jnp.stack(each) for each in zip(*fresh, strict=True)) if isinstance(
            fresh, list) else fresh

        def write(whole: Array, new: Array, axis: int) -> Array:
            return _over_rows(source, whole, lambda at, _: jax.lax.dynamic_slice_in_dim(
                new, at, 1, 0))

        return self._map(write, *(a.transpose(3, 0, 1, 2, 4) for a in (k, v)))

    def copy(self, source: Array, width: int) -> "StackedKV":
        def write(whole: Array, _: Array, axis: int) -> Array:
            sizes = [*whole.shape]
            sizes[0], sizes[axis] = 1, width
            return _over_rows(source, whole, lambda at, whole: jax.lax.dynamic_slice(
                whole, (at, 0, 0, 0, 0), sizes))

        return self._map(write, self.k, self.k)

    def select(self, slots: Array) -> "StackedKV":
        return jax.tree.map(lambda a: a[slots], self)

    def _map(self, write: Callable[[Array, Array, int], Array], k: Array, v: Array) -> "StackedKV":
        """Returns write(array, new, axis of its slots) of both, with new [p, L, G, E, n] as given.
        """
        v, axis = (v, 4) if self.transposed else (v.swapaxes(3, 4), 3)
        return self.replace(k=write(self.k, k, 4), v=write(self.v, v, axis))


def _over_rows(source: Array, whole: Array, block: Callable[[Array, Array], Array]) -> Array:
    """Overwrites the start of rows b of [B, ...] by block(source[b], whole), [1, ...]."""
    return for_rows(source, lambda b, at, whole: jax.lax.dynamic_update_slice(
        whole, block(at, whole).astype(whole.dtype), (b, 0, 0, 0, 0)), whole)
