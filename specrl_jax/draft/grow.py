"""Growing a network's trees level by level, likeliest nodes first (EAGLE-2, 2406.16858).

Letters: K nodes of a row are expanded at each level and have up to K children each; C = K * K are
a level's candidates. The candidates of all levels are kept, and the likeliest make the tree.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from specrl_kernels.tree_attention import tree_attention

from specrl_jax.draft.network import KV, Growth
from specrl_jax.draft.protocol import Survive
from specrl_jax.draft.tree import attach, roots
from specrl_jax.prng import gumbel
from specrl_jax.structs import Array, DraftTree, Proposal, Frontier, Sampling, SpecConfig

_FALL = 0.3  # a drawn tree's draft_prob: 0.7 for a node's first child, then 0.3 of the one before
_OWN_DOMAIN = 0x5EED0DD5  # turns a row's key into one whose noise the match rule never uses
_ERROR_SCALE = 0.5  # of the drafter's perturbed scores: fits synthetic ones that err by 0.5 best


@struct.dataclass
class LevelNodes:
    """The nodes of a level that are expanded, [B, K]; the root alone, [B, 1], at first."""

    index: Array  # i32, 0 is the root, then the candidates of all levels
    slot: Array  # i32 in the tree's keys; of their parents until they are run
    token: Array  # i32
    survival: Array  # f32
    live: Array  # bool
    hidden: Array  # f[F, B, K] their outputs; their parents' until they are run


@struct.dataclass
class Expanded:
    """The nodes that were expanded at each level, and what their children were drawn from."""

    index: Array  # i32[B, D, K] as in LevelNodes; -1 is none
    logq: Array  # f32[B, D, K, Vd]


def attend(q: Array, packed: tuple[Array, Array], fresh: tuple[Array, Array], parent: Array,
           cache: tuple[Array, Array], length: Array) -> Array:
    """Tree attention of q [G, R, E, ...].

    Args:
      packed: (row, node) i32[W] of the queries, in their order.
      fresh: the tree's (k, v), each [B, n, G, E].
      parent: i32[B, n].
      cache: (k [B, G, E, S], v [B, G, S, E]); length: i32[B].
    """
    g, r, e = q.shape[:3]
    out = tree_attention(q.reshape(g * r, e, -1).transpose(2, 0, 1), *packed, *fresh, parent,
                         *cache, length, scale=e**-0.5)
    return out.transpose(1, 2, 0).reshape(q.shape)


def grow(growth: Growth, params: Any, cache: KV, hidden: Array, frontier: Frontier, rows: Sampling,
         spec: SpecConfig, survive: Survive) -> DraftTree:
    """The trees of one round.

    Args:
      cache: the drafter's keys and values of all that it can read.
      hidden: f[F, B] its output at the last position.
    """
    batch, k = frontier.root.shape[0], growth.branch
    none = jnp.zeros((batch, 1), jnp.int32)
    reads = frontier.live & (frontier.context >= growth.network.ahead)
    front = LevelNodes(index=none, slot=none, token=frontier.root[:, None],
                     survival=jnp.ones((batch, 1)), hidden=hidden[..., None],
                     live=reads[:, None])
    first, logq = _children(growth, params, front, frontier, rows, spec, survive, jnp.int32(1))
    drawn = _note(_unknown(growth, params, batch), logq, front, rows, jnp.int32(1))
    levels = jax.tree.map(
        lambda a: jnp.zeros((batch, growth.depth, k * k), a.dtype).at[:, 0, :k].set(a), first)
    tree = _rooted(growth, cache, frontier)
    broken = _broken(front, first)
    front = _next_level(growth, first, front, rows, jnp.int32(1))

    def level(depth: Array, carry: tuple) -> tuple:
        levels, front, tree, drawn, broken = carry
        front, tree = _run(growth, params, cache, front, tree, frontier, depth)
        found, logq = _children(growth, params, front, frontier, rows, spec, survive, depth)
        levels = jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_index_in_dim(whole, new, depth - 1, 1),
            levels, found)
        return (levels, _next_level(growth, found, front, rows, depth), tree,
                _note(drawn, logq, front, rows, depth), broken | _broken(front, found))

    last = jnp.minimum(spec.steps, growth.depth)
    levels, _, _, drawn, broken = jax.lax.fori_loop(
        2, last + 1, level, (levels, front, tree, drawn, broken))
    tree, place = _likeliest(growth, levels, frontier)
    return tree.replace(logq=tree.logq.at[:, 0].set(jnp.where(broken, jnp.nan, 0)),
                        proposal=_proposal(growth, params, drawn, place))


def _broken(front: LevelNodes, found: DraftTree) -> Array:
    """bool[B] whether scores after some node of a level are not finite."""
    gap = found.score_gap.reshape(*front.live.shape, -1)[..., 0]  # of the best score to itself
    return (front.live & jnp.isnan(gap)).any(1)


def no_proposal(growth: Growth, params: Any, batch: int) -> Proposal | None:
    """That no node's children were drawn from anything; None where nobody asks."""
    if not growth.drawn:
        return None
    vocab = growth.network.vocab(params)
    return Proposal(jnp.full((batch, growth.nodes, vocab.shape[0]), -jnp.inf), vocab)


def _unknown(growth: Growth, params: Any, batch: int) -> Expanded | None:
    """That no level was expanded yet; None where nobody asks what was drawn from."""
    if not growth.drawn:
        return None
    shape = (batch, growth.depth, growth.branch)
    return Expanded(jnp.full(shape, -1, jnp.int32),
                    jnp.full((*shape, growth.network.vocab(params).shape[0]), -jnp.inf))


def _note(drawn: Expanded | None, logq: Array, front: LevelNodes, rows: Sampling, depth: Array
          ) -> Expanded | None:
    """Adds what the children at `depth`, those of a level, were drawn from.

    A greedy row's are point masses.
    """
    if drawn is None:
        return None
    asked = front.live & (rows.temperature > 0)[:, None]
    width = logq.shape[1]  # the root alone, at first
    return Expanded(
        drawn.index.at[:, depth - 1, :width].set(front.index),
        drawn.logq.at[:, depth - 1, :width].set(jnp.where(asked[..., None], logq, -jnp.inf)))


def _proposal(growth: Growth, params: Any, drawn: Expanded | None, place: Array) -> Proposal | None:
    """What the successors of a tree's nodes were drawn from.

    Args:
      place: i32[B, C'] of the root and each candidate in the tree; N for what is not in it.
    """
    if drawn is None:
        return None
    batch, _, _, vocab = drawn.logq.shape
    index = drawn.index.reshape(batch, -1)
    at = jnp.where(index < 0, growth.nodes, jnp.take_along_axis(place, jnp.maximum(index, 0), 1))
    none = no_proposal(growth, params, batch)
    return none.replace(logq=none.logq.at[jnp.arange(batch)[:, None], at].set(
        drawn.logq.reshape(batch, -1, vocab), mode="drop"))


def _rooted(growth: Growth, cache: KV, frontier: Frontier) -> tuple[KV, Array]:
    """The tree's keys and values, and i32[B, n] parents: node 0 is the last processed position."""
    last = _last(growth, frontier)[:, None, None, None]
    room = ((0, 0), (0, (growth.depth - 1) * growth.branch), (0, 0), (0, 0))

    def first(k: Array, v: Array) -> tuple[Array, Array]:
        at_last = (jnp.take_along_axis(k, last, 3)[..., 0],
                   jnp.take_along_axis(v, last, 2)[:, :, 0])
        k, v = (jnp.pad(a[:, None], room) for a in at_last)
        return k, v

    fresh = [first(k, v) for k, v in cache]
    return fresh, jnp.zeros(fresh[0][0].shape[:2], jnp.int32)


def _last(growth: Growth, frontier: Frontier) -> Array:
    """i32[B] the last processed position."""
    return jnp.maximum(frontier.context - growth.network.ahead, 0)


def _run(growth: Growth, params: Any, cache: KV, front: LevelNodes, tree: tuple[KV, Array],
         frontier: Frontier, depth: Array) -> tuple[LevelNodes, tuple[KV, Array]]:
    """Runs the level, nodes of `depth` - 1, and adds its keys to the tree's."""
    batch, k = front.token.shape
    start, last = 1 + (depth - 2) * k, _last(growth, frontier)
    node = jnp.broadcast_to(start + jnp.arange(k)[None], (batch, k))
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), k)

    def put(whole: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, new.astype(whole.dtype), start, 1)

    parent = put(tree[1], front.slot)
    fresh: KV = []

    def look(index: int, q: Array, new_k: Array, new_v: Array) -> Array:
        k, v = (put(whole, new.transpose(2, 3, 0, 1))
                for whole, new in zip(tree[0][index], (new_k, new_v), strict=True))
        fresh.append((k, v))
        return attend(q, (row, node.reshape(-1)), (k, v), parent, cache[index], last)

    place = jnp.broadcast_to((last + depth - 1)[:, None], (batch, k))
    hidden = growth.network.run(params, front.token, front.hidden, place, look)
    return front.replace(hidden=hidden, slot=node), (fresh, parent)


def _children(growth: Growth, params: Any, front: LevelNodes, frontier: Frontier, rows: Sampling,
              spec: SpecConfig, survive: Survive, depth: Array) -> tuple[DraftTree, Array]:
    """The candidates below a level, fields [B, k * K]; none where logits are not finite.

    A child's score is what its siblings are ranked by. Parents are indices of candidates. Also
    log-probabilities f32[B, k, Vd] of all tokens.
    """
    ranked, logq, scale = _scores(growth, params, front, frontier, rows, depth)
    best, at = highest(ranked, growth.branch)
    rank = jnp.broadcast_to(jnp.arange(growth.branch)[None, None], at.shape)
    asked = rank < spec.branch
    chosen = jnp.take_along_axis(logq, at, 2)
    if growth.drawn:
        draft_prob = (1 - _FALL) * jnp.float32(_FALL) ** rank
    else:
        draft_prob = (
            _share(best, ranked, scale) if growth.children == "perturbed" else jnp.exp(chosen)
        )
    draft_prob = jnp.where(asked, draft_prob, 0)
    above, parent, level, origin = (
        jnp.broadcast_to(a, at.shape) for a in (
            front.survival[..., None], front.index[..., None], depth, jnp.int32(growth.origin)))
    survival = survive(above, draft_prob, level, origin)
    vocab = growth.network.vocab(params)
    found = DraftTree(tokens=vocab[at], parent=parent, depth=level, rank=rank,
                      origin=origin, survival=survival, logq=chosen, draft_prob=draft_prob,
                      score_gap=best[..., :1] - best,
                      live=front.live[..., None] & asked & jnp.isfinite(best))
    return jax.tree.map(lambda a: a.reshape(a.shape[0], -1), found), logq


def _scores(growth: Growth, params: Any, front: LevelNodes, frontier: Frontier, rows: Sampling,
            depth: Array) -> tuple[Array, Array, Array]:
    """Scores and log-probabilities of all tokens after each node of a level.

    The noise is that of the draw that decides between the children: the token drawn after the root
    has the index frontier.generated. A row's truncation is not applied: a sharper drafter gained
    nearly as much where it was measured, without a search at each node (experiments/LOG.md,
    2026-11-23).

    Returns:
      f32[B, k, Vd] each; and f32[B], 0 where a row is greedy and 1 elsewhere.
    """
    network = growth.network
    logits = jnp.moveaxis(network.logits(params, front.hidden), 0, -1)
    scale = jnp.where(rows.temperature == 0, 0.0, 1.0)
    temperature = jnp.where(scale > 0, rows.temperature * growth.temperature, 1.0)
    logits = logits / temperature[:, None, None]
    logq = jax.nn.log_softmax(logits)
    if growth.children == "top":
        return logq, logq, scale
    own = growth.children == "sampled"
    key = rows.key ^ jnp.uint32(_OWN_DOMAIN) if own else rows.key
    noise = gumbel(key, frontier.generated + depth - 1, network.vocab(params))
    return logq + (scale[:, None] * noise)[:, None], logq, scale


def highest(scores: Array, count: int) -> tuple[Array, Array]:
    """The highest along the last axis and their places, the first of equals first.

    Not `top_k`, for which a CPU sorts the whole vocabulary when there is more than one row.
    """
    total = scores.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)

    def pick(left: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        best = left.max(-1, keepdims=True)
        at = jnp.where(left == best, index, total).min(-1, keepdims=True)
        return jnp.where(index == at, -jnp.inf, left), (best[..., 0], at[..., 0])

    _, (best, at) = jax.lax.scan(pick, scores, None, length=count)
    return jnp.moveaxis(best, 0, -1), jnp.moveaxis(at, 0, -1)


def _share(best: Array, ranked: Array, scale: Array) -> Array:
    """How likely each child is to be the actor's draw, given the noise: f32[B, k, K].

    The actor's perturbed scores are the drafter's plus errors. With Gumbel errors of one scale, the
    highest of them is distributed as a softmax of the drafter's scores over that scale. The
    drafter's probability would be far too low: the noise has chosen already. Greedy rows have no
    noise, and their share is the probability.
    """
    sharp = jnp.where(scale > 0, 1 / _ERROR_SCALE, 1.0)[:, None, None]
    return jnp.exp(best * sharp - jax.nn.logsumexp(ranked * sharp, -1, keepdims=True))


def _next_level(growth: Growth, found: DraftTree, front: LevelNodes, rows: Sampling, depth: Array
              ) -> LevelNodes:
    """The K likeliest of a level's candidates.

    Nothing follows a stop token; but in a drawn tree its places are not given to other nodes.
    """
    k = growth.branch
    ends = (found.tokens[..., None] == rows.stop[None, None]).any(-1) & (not growth.drawn)
    score = jnp.where(found.live & ~ends, found.survival, -1.0)
    score, at = jax.lax.top_k(score, k)
    above = at // k
    pick = jnp.take_along_axis
    return LevelNodes(index=1 + (depth - 1) * k * k + at, slot=pick(front.slot, above, 1),
                    token=pick(found.tokens, at, 1), survival=jnp.maximum(score, 0),
                    live=score >= 0, hidden=pick(front.hidden, above[None], 2))


def _likeliest(growth: Growth, levels: DraftTree, frontier: Frontier) -> tuple[DraftTree, Array]:
    """Trees of the N - 1 likeliest candidates [B, D, C], and where each candidate stands.

    Survival never grows along a path, and of equals the earlier counts more; so what is kept is
    closed under parent.
    """
    flat = jax.tree.map(lambda a: a.reshape(a.shape[0], -1), levels)
    total = flat.live.shape[1]
    size = min(growth.nodes - 1, total)
    score = jnp.where(flat.live, flat.survival, -1.0)
    best, kept = jax.lax.top_k(score, size)
    order = jnp.where(best >= 0, kept, kept + total)  # as found, parents first; the dead behind
    kept = -jax.lax.top_k(-order, size)[0] % total
    rows_of = jnp.arange(frontier.root.shape[0])[:, None]
    nowhere = jnp.full((frontier.root.shape[0], total + 1), growth.nodes, jnp.int32)
    place = nowhere.at[:, 0].set(0).at[rows_of, kept + 1].set(
        1 + jnp.arange(size, dtype=jnp.int32)[None])
    chosen = jax.tree.map(lambda a: jnp.take_along_axis(a, kept, 1), flat)
    chosen = chosen.replace(parent=jnp.take_along_axis(place, chosen.parent, 1))
    chosen = jax.tree.map(lambda a: a.T, chosen)
    return attach(roots(frontier.root, frontier.live, growth.nodes), chosen), place
