"""Trees as fixed-width arrays: how they are built, and how they are pruned."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specrl_jax.draft.protocol import DraftRequest
from specrl_jax.structs import Array, DraftTree, TreeNodes

NODE_FIELDS = tuple(field.name for field in dataclasses.fields(TreeNodes))


def roots(root: Array, live: Array, nodes: int) -> DraftTree:
    """Returns trees of a root i32[B] and nothing else, padded to N = `nodes`."""
    shape = (root.shape[0], nodes)
    zeros, first = jnp.zeros(shape, jnp.int32), jnp.arange(nodes)[None] == 0
    return DraftTree(tokens=jnp.where(first, root[:, None], 0), parent=zeros, depth=zeros,
                     rank=zeros, origin=zeros,
                     survival=jnp.broadcast_to(first.astype(jnp.float32), shape),
                     logq=jnp.zeros(shape), draft_prob=jnp.ones(shape), score_gap=jnp.zeros(shape),
                     live=first & live[:, None], broken=jnp.zeros(root.shape[0], bool))


def map_nodes(function: Callable[..., Array], tree: DraftTree, *others: TreeNodes) -> DraftTree:
    """Applies a function to each [B, N] field of trees; the other fields come from `tree`."""
    return tree.replace(**{name: function(*(getattr(t, name) for t in (tree, *others)))
                           for name in NODE_FIELDS})


def attach(tree: DraftTree, children: TreeNodes) -> DraftTree:
    """Puts nodes [C, B], C < N, behind the roots of `tree`, whose indices their parents are; dead
    ones become zeros.
    """
    def put(old: Array, new: Array) -> Array:
        new = jnp.where(children.live, new, jnp.zeros_like(new)).T.astype(old.dtype)
        return old.at[:, 1 : 1 + len(children.tokens)].set(new)

    return map_nodes(put, tree, children)


def chain(tokens: Array, draft_prob: Array, request: DraftRequest, *, nodes: int, origin: int = 0
          ) -> DraftTree:
    """Returns trees of one chain each, cut at `spec.depth`; N = `nodes` is more than D.

    Args:
      tokens: i32[D, B]; a chain ends before its first negative token.
      draft_prob: f32[D, B] the drafter's probability of each token, given the one before it.
      origin: index of the drafter, for DraftTree.origin.
    """
    frontier, depth = request.frontier, tokens.shape[0]
    level = jnp.arange(1, depth + 1, dtype=jnp.int32)[:, None]
    live = jnp.cumprod((tokens >= 0) & (level <= request.spec.depth), 0) > 0
    level, none = jnp.broadcast_to(level, tokens.shape), jnp.zeros_like(tokens)

    def below(above: Array, node: tuple[Array, Array]) -> tuple[Array, Array]:
        draft_prob, level = node
        survival = request.survive(above[:, None], draft_prob[:, None], level[:, None],
                                   jnp.full_like(level, origin)[:, None])[:, 0]
        return survival, survival

    _, survival = jax.lax.scan(below, jnp.ones_like(draft_prob[0]), (draft_prob, level))
    children = TreeNodes(tokens=tokens, parent=level - 1, depth=level, rank=none,
                         origin=none + origin, survival=survival, logq=jnp.log(draft_prob),
                         draft_prob=draft_prob, score_gap=jnp.zeros(tokens.shape),
                         live=live & frontier.live[None])
    return attach(roots(frontier.root, frontier.live, nodes), children)


def compact(tree: DraftTree, live: Array, nodes: int) -> tuple[Array, Array, Array, Array, Array]:
    """Moves the kept nodes `live` bool[B, N] of each row to its front, in their old order.

    Returns tokens, parent, depth i32[B, n], live bool[B, n] and i32[B, n] the old index of each of
    n = `nodes` nodes, which hold the live nodes of any row.
    """
    batch, total = live.shape
    behind = jnp.cumsum(~live, 1) - ~live + live.sum(1, keepdims=True)
    moved_to = jnp.where(live, jnp.cumsum(live, 1) - live, behind)
    order = jnp.zeros((batch, total), jnp.int32).at[
        jnp.arange(batch)[:, None], moved_to].set(
            jnp.arange(total)[None], unique_indices=True)[:, :nodes]

    kept, tokens, parent, depth = (
        jnp.take_along_axis(a, order, 1) for a in (live, tree.tokens, tree.parent, tree.depth))
    parent = jnp.where(kept, jnp.take_along_axis(moved_to, parent, 1), 0).astype(jnp.int32)
    return tokens, parent, jnp.where(kept, depth, 0), kept, order
