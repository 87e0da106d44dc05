"""The actor's draw: y = argmax_v(logp[v] + G[v]) of the processed distribution.

Logits are [V, W], as the head makes them. The vocabulary is read once, in chunks, with the noise
made inside; truncation is a threshold found by bisection over float bits, without a sort, and only
in rounds in which some row asks for it.
"""

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.prng import gumbel
from specrl_jax.structs import Array

_CPU_CHUNK = 4096  # vocabulary rows at once; experiments/LOG.md


@struct.dataclass
class Draw:
    """One draw at each packed position."""

    token: Array  # i32[W]
    logprob: Array  # f32[W] of the processed, renormalised distribution; 0 at temperature 0
    raw_logprob: Array  # f32[W] at the row's temperature (1 at temperature 0), no truncation
    kept_mass: Array  # f32[W]


@struct.dataclass
class Truncation:
    """A token is kept if its score is above `score`, or equal to it with an id up to `last`."""

    score: Array  # f32[W]
    last: Array  # i32[W]


def draw(logits: Array, temperature: Array, top_k: Array, top_p: Array, key: Array,
         position: Array) -> Draw:
    """Draws one token for each of W positions.

    Processing: temperature, top-k, top-p of what top-k kept, renormalisation; ties by token id.

    Args:
      logits: f32[V, W].
      temperature, top_p: f32[W]; temperature 0 is argmax without noise.
      top_k: i32[W]; 0 is off.
      key: u32[W, 2].
      position: i32[W] index of the token being drawn; 0 is the first of the response.
    """
    greedy = temperature == 0
    scores = logits / jnp.where(greedy, 1.0, temperature)[None]
    scale = jnp.where(greedy, 0.0, 1.0)

    def truncated(scores: Array) -> tuple[Array, ...]:
        return _scan(scores, _truncate(scores, top_k, top_p), scale, key, position)

    def whole(scores: Array) -> tuple[Array, ...]:
        return _scan(scores, None, scale, key, position)

    token, score, top, total, kept = jax.lax.cond(
        ((top_k > 0) | (top_p < 1)).any(), truncated, whole, scores)
    return Draw(token=token, logprob=jnp.where(greedy, 0.0, score - top - jnp.log(kept)),
                raw_logprob=score - top - jnp.log(total), kept_mass=kept / total)


def _scan(scores: Array, truncation: Truncation | None, scale: Array, key: Array, position: Array
          ) -> tuple[Array, ...]:
    """One pass over the vocabulary.

    Returns:
      [W] each: the token, its score, the highest score, and the sums of exp(score - highest) over
      all tokens and over those kept.
    """
    vocab, width = scores.shape
    size = min(_CPU_CHUNK, vocab) if jax.default_backend() == "cpu" else vocab
    low, zero = jnp.full(width, -jnp.inf), jnp.zeros(width)

    def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        best, token, score, top, total, kept = carry
        start = jnp.minimum(i * size, vocab - size)  # the last chunk may overlap the one before
        ids = start + jnp.arange(size)
        x = jax.lax.dynamic_slice_in_dim(scores, start, size, 0).T
        x = jnp.where((ids >= i * size)[None], x, -jnp.inf)
        noisy = x + scale[:, None] * gumbel(key, position, ids)
        if truncation is not None:
            keep = _kept(x, ids[None], truncation)
            noisy = jnp.where(keep, noisy, -jnp.inf)
        # Three plain reductions over a stored chunk: fused, the noise would be made for each of
        # them, and a CPU's argmax is not vectorised (experiments/LOG.md).
        noisy, x = jax.lax.optimization_barrier((noisy, x))
        first = noisy.max(1)
        at = jnp.where(noisy == first[:, None], ids[None], vocab).min(1)
        here = jnp.where(ids[None] == at[:, None], x, -jnp.inf).max(1)
        wins = first > best
        higher = jnp.maximum(top, x.max(1))
        rescale, mass = jnp.exp(top - higher), jnp.exp(x - higher[:, None])
        total = total * rescale + mass.sum(1)
        if truncation is not None:
            kept = kept * rescale + jnp.where(keep, mass, 0).sum(1)
        return (jnp.maximum(first, best), jnp.where(wins, at, token).astype(jnp.int32),
                jnp.where(wins, here, score), higher, total, kept)

    carry = (low, jnp.zeros(width, jnp.int32), zero, jnp.full(width, -1e30), zero, zero)
    steps = -(-vocab // size)
    _, token, score, top, total, kept = (
        body(jnp.int32(0), carry) if steps == 1 else jax.lax.fori_loop(0, steps, body, carry))
    return token, score, top, total, total if truncation is None else kept


def _kept(scores: Array, ids: Array, truncation: Truncation) -> Array:
    """bool[W, size] of scores f32[W, size]."""
    edge = truncation.score[:, None]
    return (scores > edge) | ((scores == edge) & (ids <= truncation.last[:, None]))


def _truncate(scores: Array, top_k: Array, top_p: Array) -> Truncation:
    """The boundary of top-k and then top-p, as a score and the last id kept at that score."""
    vocab = scores.shape[0]
    order = _ordered(scores)
    ones = jnp.ones_like(scores)
    in_top_k = _prefix(order, ones, jnp.where(top_k > 0, top_k, vocab).astype(jnp.float32))
    mass = jnp.where(in_top_k, jnp.exp(scores - scores.max(0, keepdims=True)), 0)
    target = jnp.where(top_p < 1, top_p, jnp.inf) * mass.sum(0)
    kept = in_top_k & _prefix(order, mass, target)
    edge = jnp.where(kept, scores, jnp.inf).min(0)
    ids = jnp.arange(vocab)[:, None]
    last = jnp.where(kept & (scores == edge[None]), ids, -1).max(0)
    return Truncation(edge, last.astype(jnp.int32))


def _ordered(x: Array) -> Array:
    """u32 that sorts as the floats do."""
    raw = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 equals 0
    return jnp.where(raw >> 31 == 1, ~raw, raw | jnp.uint32(1 << 31))


def _prefix(order: Array, weight: Array, target: Array) -> Array:
    """bool[V, W]: tokens that, by falling score and then id, start before `target` weight."""

    def weight_from(bound: Array) -> Array:
        return jnp.where(order >= bound[None], weight, 0).sum(0)

    def bisect(i: Array, bound: Array) -> Array:
        higher = bound | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(weight_from(higher) >= target, higher, bound)

    edge = jax.lax.fori_loop(0, 32, bisect, jnp.zeros(order.shape[1], jnp.uint32))
    above = jnp.where(order > edge[None], weight, 0).sum(0)
    tied = order == edge[None]
    before = above[None] + jnp.cumsum(jnp.where(tied, weight, 0), 0) - jnp.where(tied, weight, 0)
    return (order > edge[None]) | (tied & (before < target[None]))
