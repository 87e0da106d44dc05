"""From packed nodes to the queries of rows, and back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_kernels.tree_attention import ancestry
from specrl_kernels.tree_attention.operands import Operands


class Rows(NamedTuple):
    """What every row asks of its context and of its own tree; Q = n R queries a key-value head."""

    queries: jax.Array  # f[B, G, Q, E]; those of a node lie together
    live: jax.Array  # bool[B, Q] whether a packed node stands there
    words: jax.Array  # i32[B, Q, C] nodes that are seen, as bits (ancestry.py)
    first: jax.Array | None  # i32[B, Q] oldest place of the row's cache that is seen; None: all


def packed_index(row: jax.Array, node: jax.Array, b: int, n: int) -> jax.Array:
    """Returns i32[b, n], the first packed query of each row's nodes; -1 for a node without one.

    By comparison: a TPU writes a scatter's entries one after the other, and libtpu 0.0.42 aborts
    where it is fused with a gather.
    """
    here = (row * n + node)[None] == jnp.arange(b * n, dtype=jnp.int32)[:, None]
    return jnp.where(here.any(1), here.argmax(1), -1).astype(jnp.int32).reshape(b, n)


def unpack(operands: Operands, groups: int, window: int | None) -> Rows:
    """Returns the rows of packed nodes, whose heads read `groups` key-value heads.

    A node that is not packed repeats query 0 and is not live.
    """
    q, row, node, parent = operands.q, operands.row, operands.node, operands.parent
    e, (b, n), repeats = q.shape[2], parent.shape, q.shape[1] // groups
    index = None if row is None or node is None else packed_index(row, node, b, n)
    queries = q if index is None else q[jnp.maximum(index, 0)]
    live = jnp.ones((b, n), bool) if index is None else index >= 0
    queries = queries.reshape(b, n, groups, repeats, e)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(b, groups, n * repeats, e)
    first = None
    if window is not None:
        position = operands.length[:, None] + ancestry.depth(parent)
        first = jnp.repeat(position - window + 1, repeats, 1)
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


def by_head(x: jax.Array, nodes: int | None = None) -> jax.Array:
    """f[B, G, nodes, E] from tree_k or tree_v; what is added is an ancestor of nobody."""
    more = 0 if nodes is None else nodes - x.shape[1]
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
