"""Growing a network's trees level by level, likeliest nodes first (EAGLE-2, 2406.16858).

Letters: K nodes of a row are expanded at each level and have up to K children each; C = K * K are
a level's candidates. The candidates of all levels are kept, and the likeliest make the tree.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from specrl_kernels.tree_attention import tree_attention

from specrl_jax.draft.children import likeliest_children
from specrl_jax.draft.network import KV, Growth, NetworkCache
from specrl_jax.draft.protocol import DraftRequest
from specrl_jax.draft.tree import attach, roots
from specrl_jax.sharding import straight_line
from specrl_jax.structs import (
    Array,
    DrafterParams,
    DraftTree,
    Frontier,
    Proposal,
    Sampling,
    TreeNodes,
)

_RANK_DECAY = 0.3  # draft_prob of drawn trees: 0.7 for the first child, then times 0.3 each


class LevelNodes(struct.PyTreeNode):
    """The nodes of a level that are expanded, [B, K]; at first the root alone, [B, 1]."""

    index: Array  # i32 0 is the root, then come the candidates of all levels
    slot: Array  # i32 index in the tree's keys; the parent's until the node is run
    token: Array  # i32
    survival: Array  # f32
    live: Array  # bool
    hidden: Array  # f[F, B, K] outputs; the parents' until the nodes are run


class Grown(struct.PyTreeNode):
    """What the levels so far have left."""

    levels: TreeNodes  # [B, D, C] candidates
    broken: Array  # bool[B] scores after some node are not finite
    index: Array | None  # i32[B, D, K] the expanded nodes of a drawn tree; -1 is none
    logq: Array | None  # f32[B, D, K, Vd] the distributions after them


@dataclasses.dataclass(frozen=True)
class _Round:
    """What every level of one round's trees is grown from."""

    growth: Growth
    params: DrafterParams
    cache: NetworkCache  # of all positions before the root
    request: DraftRequest

    @property
    def last(self) -> Array:
        """i32[B] the last processed position."""
        return jnp.maximum(self.request.frontier.context - self.growth.network.ahead, 0)


def attend(q: Array, packed: tuple[Array, Array], fresh: tuple[Array, Array], parent: Array,
           cache: NetworkCache, index: int, length: Array) -> Array:
    """Runs tree attention of layer `index` on queries [G, R, E, ...].

    Args:
      packed: (row, node) i32[W] of the queries, in their order.
      fresh: the tree's (k, v), each [B, n, G, E]; parent: i32[B, n].
      length: i32[B] positions of the cache.
    """
    g, r, e = q.shape[:3]
    out = tree_attention(q.reshape(g * r, e, -1).transpose(2, 0, 1), *packed, *fresh, parent,
                         *cache.kv[index], length, scale=e**-0.5,
                         transposed_v=cache.transposed)
    return out.transpose(1, 2, 0).reshape(q.shape)


def grow(growth: Growth, params: DrafterParams, cache: NetworkCache, request: DraftRequest
         ) -> DraftTree:
    """Grows one round's trees; `cache` has all positions before the root."""
    r, frontier, spec = _Round(growth, params, cache, request), request.frontier, request.spec
    none = jnp.zeros((frontier.root.shape[0], 1), jnp.int32)
    reads = frontier.live & (frontier.context >= growth.network.ahead)
    grown, front = _expand(r, None, LevelNodes(
        index=none, slot=none, token=frontier.root[:, None], survival=jnp.ones(none.shape),
        hidden=cache.hidden.T[..., None], live=reads[:, None]), jnp.int32(1))

    def level(depth: Array, carry: tuple) -> tuple:
        grown, front, keys = carry
        front, keys = _forward_level(r, front, keys, depth)
        return (*_expand(r, grown, front, depth), keys)

    # Levels below the planned depth are masked where a loop of unknown length would ask the host.
    deepest = growth.depth if straight_line() else jnp.minimum(spec.depth, growth.depth)
    grown, _, _ = jax.lax.fori_loop(2, deepest + 1, level, (grown, front, _root_keys(r)))
    tree, index = _likeliest(growth, grown.levels, frontier)
    return tree.replace(broken=grown.broken, proposal=_proposal(growth, params, grown, index))


def _expand(r: _Round, grown: Grown | None, front: LevelNodes, depth: Array
            ) -> tuple[Grown, LevelNodes]:
    """Adds the candidates below a level and the distributions that they were drawn from."""
    front = front.replace(live=front.live & (depth <= r.request.spec.depth))
    candidates, logq = _candidates(r, front, depth)
    grown, width = grown or _nothing(r.growth, candidates, logq), front.live.shape[1]
    room = ((0, 0), (0, grown.levels.live.shape[2] - candidates.live.shape[1]))
    levels = jax.tree.map(lambda array, new: jax.lax.dynamic_update_index_in_dim(
        array, jnp.pad(new, room), depth - 1, 1), grown.levels, candidates)
    gap = candidates.score_gap.reshape(*front.live.shape, -1)[..., 0]  # of the best score to itself
    grown = grown.replace(levels=levels, broken=grown.broken | (front.live & jnp.isnan(gap)).any(1))
    if grown.index is not None and grown.logq is not None and logq is not None:
        # Greedy rows draw nothing.
        draws = front.live & (r.request.sampling.temperature > 0)[:, None]
        at = (slice(None), depth - 1, slice(width))
        grown = grown.replace(
            index=grown.index.at[at].set(front.index),
            logq=grown.logq.at[at].set(jnp.where(draws[..., None], logq, -jnp.inf)))
    return grown, _next_level(r.growth, candidates, front, r.request.sampling, depth)


def _nothing(growth: Growth, like: TreeNodes, logq: Array | None) -> Grown:
    """Returns levels without a node, for candidates and distributions like those of the first."""
    shape = (like.live.shape[0], growth.depth, growth.branch)
    levels = jax.tree.map(lambda a: jnp.zeros((*shape[:2], growth.branch**2), a.dtype), like)
    broken = jnp.zeros(shape[0], bool)
    if logq is None:
        return Grown(levels, broken, None, None)
    return Grown(levels, broken, jnp.full(shape, -1, jnp.int32),
                 jnp.full((*shape, logq.shape[-1]), -jnp.inf))


def no_proposal(growth: Growth, params: DrafterParams, batch: int) -> Proposal | None:
    """Returns a Proposal in which no node's children were drawn; None if trees carry none."""
    if not growth.drawn:
        return None
    vocab = growth.network.vocab(params)
    return Proposal(jnp.full((batch, growth.nodes, vocab.shape[0]), -jnp.inf), vocab)


def _proposal(growth: Growth, params: DrafterParams, grown: Grown, in_tree: Array
              ) -> Proposal | None:
    """Returns the distributions that the children of a tree's nodes were drawn from.

    `in_tree` i32[B, C'] is the index in the tree of the root and of each candidate; N outside it.
    """
    batch = in_tree.shape[0]
    unknown = no_proposal(growth, params, batch)
    if unknown is None or grown.index is None or grown.logq is None:
        return None
    index = grown.index.reshape(batch, -1)
    at = jnp.where(index < 0, growth.nodes, jnp.take_along_axis(in_tree, jnp.maximum(index, 0), 1))
    return unknown.replace(logq=unknown.logq.at[jnp.arange(batch)[:, None], at].set(
        grown.logq.reshape(batch, -1, grown.logq.shape[-1]), mode="drop"))


def _root_keys(r: _Round) -> tuple[KV, Array]:
    """Returns the tree's keys and values, and parents i32[B, n]; node 0 is the last position."""
    room = ((0, 0), (0, (r.growth.depth - 1) * r.growth.branch), (0, 0), (0, 0))
    fresh = [(jnp.pad(k[:, None], room), jnp.pad(v[:, None], room)) for k, v in r.cache.last]
    return fresh, jnp.zeros(fresh[0][0].shape[:2], jnp.int32)


def _forward_level(r: _Round, front: LevelNodes, keys: tuple[KV, Array], depth: Array
                   ) -> tuple[LevelNodes, tuple[KV, Array]]:
    """Runs the nodes of level `depth` - 1 and adds their keys to the tree's."""
    batch, k = front.token.shape
    start, last = 1 + (depth - 2) * k, r.last
    node = jnp.broadcast_to(start + jnp.arange(k)[None], (batch, k))
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), k)

    def put(array: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(array, new.astype(array.dtype), start, 1)

    parent = put(keys[1], front.slot)
    fresh: KV = []

    def look(index: Any, q: Array, new_k: Array, new_v: Array) -> Array:
        k, v = (put(array, new.transpose(2, 3, 0, 1))
                for array, new in zip(keys[0][index], (new_k, new_v), strict=True))
        fresh.append((k, v))
        return attend(q, (row, node.reshape(-1)), (k, v), parent, r.cache, index, last)

    position = jnp.broadcast_to((last + depth - 1)[:, None], (batch, k))
    hidden = r.growth.network.run(r.params, front.token, front.hidden, position, look)
    return front.replace(hidden=hidden, slot=node), (fresh, parent)


def _candidates(r: _Round, front: LevelNodes, depth: Array) -> tuple[TreeNodes, Array | None]:
    """Returns the candidates below a level [B, k * K], and log-probabilities f32[B, k, Vd].

    Where logits are not finite none is live. Parents are indices of candidates. Only drawn trees
    have log-probabilities.
    """
    growth, network = r.growth, r.growth.network
    children, logq = likeliest_children(
        growth, network.logits(r.params, front.hidden), network.vocab(r.params), r.request.sampling,
        r.request.frontier.generated + depth - 1)
    shape = children.token.shape
    rank = jnp.broadcast_to(jnp.arange(growth.branch)[None, None], shape)
    planned = rank < r.request.spec.branch
    if growth.drawn:
        draft_prob = (1 - _RANK_DECAY) * jnp.float32(_RANK_DECAY) ** rank
    elif growth.children == "perturbed":
        draft_prob = children.draw_prob
    else:
        draft_prob = jnp.exp(children.logq)
    draft_prob = jnp.where(planned, draft_prob, 0)
    above, parent, level, origin = (
        jnp.broadcast_to(a, shape) for a in (
            front.survival[..., None], front.index[..., None], depth, jnp.int32(growth.origin)))
    nodes = TreeNodes(tokens=children.token, parent=parent, depth=level, rank=rank, origin=origin,
                      logq=children.logq, draft_prob=draft_prob,
                      survival=r.request.survive(above, draft_prob, level, origin),
                      score_gap=children.score[..., :1] - children.score,
                      live=front.live[..., None] & planned & jnp.isfinite(children.score))
    return jax.tree.map(lambda a: a.reshape(a.shape[0], -1), nodes), logq


def _next_level(growth: Growth, candidates: TreeNodes, front: LevelNodes, rows: Sampling,
                depth: Array) -> LevelNodes:
    """Selects the K likeliest of a level's candidates.

    Stop tokens are not expanded; except in a drawn tree, whose shape depends on no token.
    """
    k = growth.branch
    ends = (candidates.tokens[..., None] == rows.stop[None, None]).any(-1) & (not growth.drawn)
    score = jnp.where(candidates.live & ~ends, candidates.survival, -1.0)
    score, at = jax.lax.top_k(score, k)
    above = at // k
    pick = jnp.take_along_axis
    return LevelNodes(index=1 + (depth - 1) * k * k + at, slot=pick(front.slot, above, 1),
                    token=pick(candidates.tokens, at, 1), survival=jnp.maximum(score, 0),
                    live=score >= 0, hidden=pick(front.hidden, above[None], 2))


def _likeliest(growth: Growth, levels: TreeNodes, frontier: Frontier) -> tuple[DraftTree, Array]:
    """Returns trees of the N - 1 likeliest candidates [B, D, C], and the index of each in them.

    Survival never grows along a path and of equals the earlier is kept: closed under parent.
    """
    flat = jax.tree.map(lambda a: a.reshape(a.shape[0], -1), levels)
    batch, total = flat.live.shape
    size = min(growth.nodes - 1, total)
    best, kept = jax.lax.top_k(jnp.where(flat.live, flat.survival, -1.0), size)
    order = jnp.where(best >= 0, kept, kept + total)  # parents first, the dead last
    kept = -jax.lax.top_k(-order, size)[0] % total
    nowhere = jnp.full((batch, total + 1), growth.nodes, jnp.int32)
    index = nowhere.at[:, 0].set(0).at[jnp.arange(batch)[:, None], kept + 1].set(
        1 + jnp.arange(size, dtype=jnp.int32)[None])
    chosen = jax.tree.map(lambda a: jnp.take_along_axis(a, kept, 1), flat)
    chosen = chosen.replace(parent=jnp.take_along_axis(index, chosen.parent, 1))
    return attach(roots(frontier.root, frontier.live, growth.nodes),
                  jax.tree.map(lambda a: a.T, chosen)), index
