"""The actor's draw: y = argmax_v(logp[v] + G[v]) of the processed distribution.

Logits are [V, W], as the head makes them. The vocabulary is read in chunks, with the noise made
inside; truncation is a threshold found by bisection over float bits, without a sort, and only
in rounds in which some row asks for it.
"""

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.prng import exponential
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


@struct.dataclass
class Processed:
    """The distribution that `draw` draws from, at each packed position."""

    logp: Array  # f32[W, V] processed, renormalised; -inf where truncation removed the token
    raw: Array  # f32[W] added to a kept token's logp, this is its raw_logprob as in Draw
    kept_mass: Array  # f32[W]


def process(logits: Array, temperature: Array, top_k: Array, top_p: Array) -> Processed:
    """The law of `draw`, whose arguments these are; at temperature 0 a point mass."""
    greedy = temperature == 0
    scores = logits * (1 / jnp.where(greedy, 1.0, temperature))[None]
    ids = jnp.arange(logits.shape[0])[None]
    keep = jax.lax.cond(
        ((top_k > 0) | (top_p < 1)).any(),
        lambda scores: _kept(scores.T, ids, _truncate(scores, top_k, top_p)),
        lambda scores: jnp.ones(scores.T.shape, bool), scores)
    mass = jnp.exp(scores - scores.max(0, keepdims=True)).T
    total, kept = mass.sum(1), jnp.where(keep, mass, 0).sum(1)
    best = (ids == scores.argmax(0)[:, None]).astype(mass.dtype)
    p = jnp.where(greedy[:, None], best, jnp.where(keep, mass, 0) / kept[:, None])
    return Processed(logp=jnp.log(p),
                     raw=jnp.where(greedy, -jnp.log(total), jnp.log(kept / total)),
                     kept_mass=kept / total)


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
    scale = 1 / jnp.where(greedy, 1.0, temperature)

    def truncated(logits: Array) -> tuple[Array, Array, Array]:
        boundary = _truncate(logits * scale[None], top_k, top_p)
        token, total, kept = _race(logits, scale, greedy, boundary, key, position)
        # A row that keeps all has the bits that it has where no row asks for truncation.
        return token, total, jnp.where((top_k > 0) | (top_p < 1), kept, total)

    def whole(logits: Array) -> tuple[Array, Array, Array]:
        return _race(logits, scale, greedy, None, key, position)

    token, total, kept = jax.lax.cond(
        ((top_k > 0) | (top_p < 1)).any(), truncated, whole, logits)
    score = (jnp.take_along_axis(logits, token[None], 0)[0] - logits.max(0)) * scale
    return Draw(token=token, logprob=jnp.where(greedy, 0.0, score - jnp.log(kept)),
                raw_logprob=score - jnp.log(total), kept_mass=kept / total)


def _race(logits: Array, scale: Array, greedy: Array, truncation: Truncation | None, key: Array,
          position: Array) -> tuple[Array, Array, Array]:
    """One pass over the vocabulary.

    argmax(logp + G) with G = -log(E) is argmin(E / p): an exponential race. It shares exp(logp)
    with the normaliser and saves the second logarithm.

    Returns:
      [W] each: the token, and the sums of exp(score - highest score) over all tokens and over those
      kept.
    """
    vocab, width = logits.shape
    size = min(_CPU_CHUNK, vocab) if jax.default_backend() == "cpu" else vocab
    top = logits.max(0) * scale

    def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        best, token, total, kept = carry
        start = jnp.minimum(i * size, vocab - size)  # the last chunk may overlap the one before
        ids = start + jnp.arange(size)
        score = jax.lax.dynamic_slice_in_dim(logits, start, size, 0).T * scale[:, None]
        score = jnp.where((ids >= i * size)[None], score, -jnp.inf)
        mass = jnp.exp(score - top[:, None])
        time = jnp.where(greedy[:, None], -score, exponential(key, position, ids) / mass)
        if truncation is not None:
            keep = _kept(score, ids[None], truncation)
            time = jnp.where(keep, time, jnp.inf)
            kept = kept + jnp.where(keep, mass, 0).sum(1)
        # Plain reductions over a stored chunk: fused, the noise would be made for each of them, and
        # a CPU's argmin is not vectorised (experiments/LOG.md).
        time, mass = jax.lax.optimization_barrier((time, mass))
        first = time.min(1)
        at = jnp.where(time == first[:, None], ids[None], vocab).min(1)
        return (jnp.minimum(first, best), jnp.where(first < best, at, token).astype(jnp.int32),
                total + mass.sum(1), kept)

    zero = jnp.zeros(width)
    carry = (jnp.full(width, jnp.inf), jnp.zeros(width, jnp.int32), zero, zero)
    steps = -(-vocab // size)
    _, token, total, kept = (
        body(jnp.int32(0), carry) if steps == 1 else jax.lax.fori_loop(0, steps, body, carry))
    return token, total, total if truncation is None else kept


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
