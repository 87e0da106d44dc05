"""Tree attention in plain XLA operations, for any device; the CPU's default.

Each segment of the committed prefix is read whole, or skipped where no context reaches it: a
product of a slice would copy the slice first (experiments/LOG.md).
"""

import functools

import jax
import jax.numpy as jnp

from specrl_kernels.tree_attention import shared_prefix
from specrl_kernels.tree_attention.shared_prefix import Prefix
from specrl_kernels.tree_attention.softmax import Partial

_MASKED = -1e30  # finite, so that a segment without a visible key gives weight 0 and not NaN


def tree_attention_xla(q: jax.Array, row: jax.Array, node: jax.Array, tree_k: jax.Array,
                       tree_v: jax.Array, parent: jax.Array,
                       cache_k: tuple[jax.Array, ...], cache_v: tuple[jax.Array, ...],
                       length: jax.Array, slot: jax.Array | None,
                       prefix: Prefix | None, *, scale: float, window: int | None) -> jax.Array:
    """See `api.tree_attention`."""
    b, n, g, e = tree_k.shape
    w, h, _ = q.shape
    queries = _unpack(q, row, node, b, n).reshape(b, n, g, h // g, e)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(b, g, n * (h // g), e) * scale
    ancestry = ancestors(parent)  # [B, n, n]
    depth = ancestry.sum(-1, dtype=jnp.int32) - 1  # [B, n]
    carry = _tree_part(queries, tree_k, tree_v, ancestry, depth, window)
    carry = _prefix_part(carry, queries, cache_k, cache_v, length, slot, depth, window)
    if prefix is not None:
        carry = _shared_part(carry, queries, prefix, length, depth, window)
    _, total, out = carry
    out = (out / total[..., None]).astype(q.dtype).reshape(b, g, n, h // g, e)
    return out[row, :, node].reshape(w, h, e)


def ancestors(parent: jax.Array) -> jax.Array:
    """bool[B, n, n]: whether node j is node i or one of its ancestors, by pointer doubling."""
    n = parent.shape[1]
    nodes = jnp.arange(n)
    has_parent = (parent[..., None] == nodes[None, None]) & (nodes > 0)[None, :, None]
    reach = has_parent | jnp.eye(n, dtype=bool)[None]
    for _ in range((n - 1).bit_length()):
        reach = (reach[..., None] & reach[:, None]).any(2)
    return reach


def _unpack(q: jax.Array, row: jax.Array, node: jax.Array, b: int, n: int) -> jax.Array:
    """[B, n, ...] from packed [W, ...]; a place that no packed node fills repeats query 0."""
    w = q.shape[0]
    if w == 1:
        return jnp.broadcast_to(q[:, None], (b, n, *q.shape[1:]))
    place = jnp.zeros((b, n), jnp.int32).at[row, node].set(jnp.arange(w, dtype=jnp.int32))
    return q[place]


def _tree_part(queries: jax.Array, tree_k: jax.Array, tree_v: jax.Array, ancestry: jax.Array,
               depth: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    if window is not None:
        ancestry &= depth[:, None, :] > depth[:, :, None] - window
    visible = jnp.repeat(ancestry, queries.shape[2] // tree_k.shape[1], axis=1)[:, None]
    score = jnp.einsum("bgqe,bmge->bgqm", queries, tree_k, preferred_element_type=jnp.float32)
    score = jnp.where(visible, score, _MASKED)
    top = score.max(-1)
    weight = jnp.exp(score - top[..., None])
    out = jnp.einsum("bgqm,bmge->bgqe", weight, tree_v, preferred_element_type=jnp.float32)
    return top, weight.sum(-1), out


def _prefix_part(carry: tuple[jax.Array, jax.Array, jax.Array], queries: jax.Array,
                 cache_k: tuple[jax.Array, ...], cache_v: tuple[jax.Array, ...], length: jax.Array,
                 slot: jax.Array | None, depth: jax.Array, window: int | None
                 ) -> tuple[jax.Array, jax.Array, jax.Array]:
    repeats = queries.shape[2] // depth.shape[1]
    oldest = None if window is None else jnp.repeat(length[:, None] + depth - window, repeats, 1)
    longest, start = length.max(), 0
    for k, v in zip(cache_k, cache_v, strict=True):
        read = functools.partial(_segment, queries, k, v, start, length, slot, oldest)
        carry = jax.lax.cond(longest > start, read, lambda carry: carry, carry)
        start += k.shape[3]
    return carry


def _segment(queries: jax.Array, k: jax.Array, v: jax.Array, start: int, length: jax.Array,
             slot: jax.Array | None, oldest: jax.Array | None,
             carry: tuple[jax.Array, jax.Array, jax.Array]
             ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the positions from `start` on to a softmax: (highest score, sum of weights, output)."""
    top, total, out = carry
    if slot is not None:
        k, v = k[slot], v[slot]
    place = start + jnp.arange(k.shape[3])
    visible = (place[None] < length[:, None])[:, None, None]
    if oldest is not None:
        visible &= (place[None, None] > oldest[..., None])[:, None]
    score = jnp.einsum("bgqe,bges->bgqs", queries, k, preferred_element_type=jnp.float32)
    score = jnp.where(visible, score, _MASKED)
    higher = jnp.maximum(top, score.max(-1))
    rescale, weight = jnp.exp(top - higher), jnp.exp(score - higher[..., None])
    fresh = jnp.einsum("bgqs,bgse->bgqe", weight, v, preferred_element_type=jnp.float32)
    return higher, total * rescale + weight.sum(-1), out * rescale[..., None] + fresh


def _shared_part(carry: tuple[jax.Array, jax.Array, jax.Array], queries: jax.Array,
                 prefix: Prefix, length: jax.Array, depth: jax.Array, window: int | None
                 ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the shared prefixes on, each read once for the queries of all rows that share it."""
    b, _, q, _ = queries.shape
    members = prefix.rows
    grouped = shared_prefix.gather_heads(members, queries)  # [P, G, M q, E]
    oldest = None
    if window is not None:
        own = jnp.repeat(length[:, None] + depth - window, q // depth.shape[1], 1)
        oldest = shared_prefix.gather(members, own) + prefix.length[:, None]
    empty = (jnp.full(grouped.shape[:3], _MASKED), jnp.zeros(grouped.shape[:3]),
             jnp.zeros(grouped.shape))
    found = _segment(grouped, prefix.k, prefix.v, 0, prefix.length, None, oldest, empty)
    part = shared_prefix.scatter(
        members, Partial(found[0][..., None], found[1][..., None], found[2]), b)
    top, total, out = carry
    higher = jnp.maximum(top, part.top[..., 0])
    mine, theirs = jnp.exp(top - higher), jnp.exp(part.top[..., 0] - higher)
    return (higher, total * mine + part.total[..., 0] * theirs,
            out * mine[..., None] + part.out * theirs[..., None])
