"""From packed nodes to the queries of rows, and back."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_kernels import dispatch, tuning
from specrl_kernels.dispatch import Target
from specrl_kernels.tree_attention import ancestry


class Rows(NamedTuple):
    """What every row asks of its context and of its own tree; Q = n R queries a key-value head."""

    queries: jax.Array  # f[B, G, Q, E]; those of a node lie together
    live: jax.Array  # bool[B, Q] whether a packed node stands there
    words: jax.Array  # i32[B, Q, C] nodes that are seen, as bits (ancestry.py)
    first: jax.Array | None  # i32[B, Q] oldest place of the row's cache that is seen; None: all


def tuning_key(batch: int, groups: int, queries: int, size: int, context: int) -> dict[str, int]:
    """The shape class that kernels look up: Q queries to each of G heads, and the cache's slots."""
    return tuning.shape_class(rows=batch, queries=queries, heads=groups, size=size, context=context)


def tuned(target: Target, name: str, rows: Rows, context: int) -> Mapping[str, int] | None:
    """The configuration given, or that of the table; None if there is neither."""
    b, g, q, e = rows.queries.shape
    return dispatch.tuned(target, "tree_attention", name, tuning_key(b, g, q, e, context),
                          rows.queries.dtype)


def places(row: jax.Array, node: jax.Array, b: int, n: int) -> jax.Array:
    """i32[b, n] index of the packed node at each place, the first of several; -1 if there is none.

    By comparison: a TPU writes a scatter's entries one after the other, and libtpu 0.0.42 aborts
    where it is fused with a gather.
    """
    here = (row * n + node)[None] == jnp.arange(b * n, dtype=jnp.int32)[:, None]
    return jnp.where(here.any(1), here.argmax(1), -1).astype(jnp.int32).reshape(b, n)


def unpack(q: jax.Array, row: jax.Array | None, node: jax.Array | None, parent: jax.Array,
           groups: int, length: jax.Array, window: int | None) -> Rows:
    """Rows of packed nodes; arguments as in `api.tree_attention`.

    A place that no packed node fills repeats query 0 and is not live.
    """
    e, (b, n), repeats = q.shape[2], parent.shape, q.shape[1] // groups
    place = None if row is None or node is None else places(row, node, b, n)
    queries = q if place is None else q[jnp.maximum(place, 0)]
    live = jnp.ones((b, n), bool) if place is None else place >= 0
    queries = queries.reshape(b, n, groups, repeats, e)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(b, groups, n * repeats, e)
    first = None
    if window is not None:
        first = jnp.repeat(length[:, None] + ancestry.depth(parent) - window + 1, repeats, 1)
    words = jnp.repeat(ancestry.visible_bits(parent, window), repeats, 1)
    return Rows(queries, jnp.repeat(live, repeats, 1), words, first)


def pack(out: jax.Array, row: jax.Array | None, node: jax.Array | None, nodes: int) -> jax.Array:
    """[W, H, E] of the packed nodes from [B, G, Q, E]; Q may be padded."""
    b, g, q, e = out.shape
    repeats = q // nodes
    by_node = out[:, :, : nodes * repeats].reshape(b, g, nodes, repeats, e)
    if row is None:
        return by_node.swapaxes(1, 2).reshape(b * nodes, g * repeats, e)
    return by_node[row, :, node].reshape(row.shape[0], g * repeats, e)


def by_head(x: jax.Array, nodes: int) -> jax.Array:
    """f[B, G, nodes, E] from tree_k or tree_v; what is added is an ancestor of nobody."""
    more = nodes - x.shape[1]
    return jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, more), (0, 0)))


def pad_queries(rows: Rows, multiple: int) -> Rows:
    """Rows whose Q is a multiple of `multiple`; the new queries are dead, see all, and are 0."""
    more = -rows.live.shape[1] % multiple
    if not more:
        return rows
    return Rows(
        jnp.pad(rows.queries, ((0, 0), (0, 0), (0, more), (0, 0))),
        jnp.pad(rows.live, ((0, 0), (0, more))),
        jnp.pad(rows.words, ((0, 0), (0, more), (0, 0)), constant_values=-1),
        None if rows.first is None else jnp.pad(rows.first, ((0, 0), (0, more)), mode="edge"))


def oldest(rows: Rows) -> jax.Array:
    """i32[B] place below which no query of the row looks."""
    if rows.first is None:
        return jnp.zeros(rows.live.shape[0], jnp.int32)
    return jnp.maximum(rows.first.min(1), 0)


def live_tiles(rows: Rows, tile: int) -> jax.Array:
    """i32[B, Q / tile]: 1 where a tile of queries holds a live one."""
    return rows.live.reshape(rows.live.shape[0], -1, tile).any(2).astype(jnp.int32)
