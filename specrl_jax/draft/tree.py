"""Trees as fixed-width arrays: roots alone, and pruning to what is kept."""

import jax
import jax.numpy as jnp

from specrl_jax.structs import Array, DraftTree


def roots(root: Array, live: Array, nodes: int) -> DraftTree:
    """Trees of a root and nothing else, padded to N = `nodes`."""
    shape = (root.shape[0], nodes)
    whole = jnp.zeros(shape, jnp.int32)
    first = jnp.arange(nodes)[None] == 0
    return DraftTree(tokens=jnp.where(first, root[:, None], 0), parent=whole, depth=whole,
                     rank=whole, origin=whole,
                     survival=jnp.broadcast_to(first.astype(jnp.float32), shape),
                     logq=jnp.zeros(shape), draft_prob=jnp.ones(shape), score_gap=jnp.zeros(shape),
                     live=first & live[:, None])


def attach(tree: DraftTree, children: DraftTree) -> DraftTree:
    """Puts nodes behind the roots; `children` has fields [C, B], C < N, dead ones among them."""
    count = children.tokens.shape[0]

    def put(old: Array, new: Array) -> Array:
        new = jnp.where(children.live, new, jnp.zeros_like(new)).T.astype(old.dtype)
        return old.at[:, 1 : 1 + count].set(new)

    return jax.tree.map(put, tree, children)


def compact(tree: DraftTree, live: Array, nodes: int) -> tuple[Array, Array, Array, Array, Array]:
    """The kept nodes of each row moved to its front, in their old order.

    Args:
      live: bool[B, N], closed under parent.
      nodes: n, at least the live nodes of any row.

    Returns:
      tokens, parent, depth i32[B, n], live bool[B, n], and i32[B, n] where each node was.
    """
    batch, total = live.shape
    ahead = jnp.cumsum(live, 1) - live
    behind = jnp.cumsum(~live, 1) - ~live + live.sum(1, keepdims=True)
    moved_to = jnp.where(live, ahead, behind)
    order = jnp.zeros((batch, total), jnp.int32).at[
        jnp.arange(batch)[:, None], moved_to].set(jnp.arange(total)[None])[:, :nodes]

    def pick(a: Array) -> Array:
        return jnp.take_along_axis(a, order, 1)

    kept = pick(live)
    parent = jnp.take_along_axis(moved_to, pick(tree.parent), 1)
    parent = jnp.where(kept, parent, 0).astype(jnp.int32)
    return pick(tree.tokens), parent, jnp.where(kept, pick(tree.depth), 0), kept, order
