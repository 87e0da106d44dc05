"""The actor's draw: y = argmax_v(logp[v] + G[v]) of the processed distribution.

Logits are [V, W], as the head makes them. The draw itself is the operation `gumbel_argmax`;
truncation is a threshold, among the highest scores or found by bisection, without a sort of the
vocabulary and only in rounds in which some row asks for it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from specrl_kernels.gumbel_argmax import Drawn, Threshold, gumbel_argmax, is_kept, scale_of

from specrl_jax.structs import Array

LANES = 128
FEW = 128  # highest scores that a CPU looks at before all


@struct.dataclass
class Draw:
    """One draw at each packed position."""

    token: Array  # i32[W]
    logprob: Array  # f32[W] of the processed, renormalised distribution; 0 at temperature 0
    raw_logprob: Array  # f32[W] at the row's temperature (1 at temperature 0), no truncation
    kept_mass: Array  # f32[W]


@struct.dataclass
class Processed:
    """The distribution that `draw` draws from, at each packed position."""

    logp: Array  # f32[W, V] processed, renormalised; -inf where truncation removed the token
    raw: Array  # f32[W] added to a kept token's logp, this is its raw_logprob as in Draw
    kept_mass: Array  # f32[W]


def process(logits: Array, temperature: Array, top_k: Array, top_p: Array) -> Processed:
    """The law of `draw`, whose arguments these are; at temperature 0 a point mass."""
    scale, greedy = scale_of(temperature)
    scores = logits * scale[None]
    ids = jnp.arange(logits.shape[0])[None]
    keep = jax.lax.cond(
        ((top_k > 0) | (top_p < 1)).any(),
        lambda scores: _truncate(scores, top_k, top_p).keeps(scores.T, ids),
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
    asks = (top_k > 0) | (top_p < 1)

    def truncated(logits: Array) -> tuple[Drawn, Array]:
        scores = logits * scale_of(temperature)[0][None]
        threshold = _truncate(scores, top_k, top_p)
        return gumbel_argmax(logits.T, temperature, key, position, threshold), threshold.kept_mass

    def whole(logits: Array) -> tuple[Drawn, Array]:
        drawn = gumbel_argmax(logits.T, temperature, key, position)
        return drawn, jnp.ones_like(temperature)

    drawn, kept_mass = jax.lax.cond(asks.any(), truncated, whole, logits)
    return Draw(token=drawn.token[:, 0], logprob=drawn.logprob[:, 0],
                raw_logprob=drawn.raw_logprob[:, 0], kept_mass=kept_mass)


def _truncate(scores: Array, top_k: Array, top_p: Array) -> Threshold:
    """The boundary of top-k and then top-p; a position that asks for neither keeps exactly 1.

    On a CPU position after position, and nothing for those that do not ask: what is looked at again
    and again stays in its cache.
    """
    return jax.lax.platform_dependent(
        scores.T, top_k, top_p,
        cpu=lambda *each: jax.lax.map(lambda one: _among_the_highest(*one), each),
        default=jax.vmap(_boundary))


def _among_the_highest(scores: Array, top_k: Array, top_p: Array) -> Threshold:
    """`_boundary`, which for peaked distributions lies among the FEW highest scores.

    A CPU finds those in a few passes if there is one position, and by a sort if there are more.
    """
    asks = (top_k > 0) | (top_p < 1)
    few = min(FEW, scores.shape[0])

    def near() -> tuple[Array, Threshold]:
        known = jnp.where(scores == 0, 0.0, scores)  # -0 would be below 0
        best, ids = jax.lax.top_k(known, few)  # of equals the lower id first
        lanes = _lanes(known)
        top = lanes.max(0).max()  # `best[0]` would make XLA sort
        mass, whole = jnp.exp(best - top), jnp.exp(lanes - top).sum(0).sum()
        every, bounded = (top_k <= 0) | (top_k >= scores.shape[0]), top_k <= few
        kept = every | (jnp.arange(few) < top_k)
        asked = top_p * jnp.where(every, whole, jnp.where(kept, mass, 0).sum())
        kept &= (top_p == 1) | (jnp.cumsum(mass) - mass < asked)
        last = jnp.maximum(kept.sum() - 1, 0)
        found = jnp.where(every, last < few - 1, bounded) & (whole > 0)  # not if one is no number
        mass = jnp.where(jnp.arange(few) <= last, mass, 0).sum()
        return found, Threshold(best[last], ids[last], mass / whole)

    def nothing() -> tuple[Array, Threshold]:
        return jnp.bool_(False), Threshold(jnp.float32(0), jnp.int32(0), jnp.float32(0))

    found, edge = jax.lax.cond(asks, near, nothing)
    return jax.lax.cond(found, lambda: edge, lambda: _boundary(scores, top_k, top_p))


def _lanes(scores: Array) -> Array:
    """f32[n, LANES] of f32[V], since a CPU does not vectorise a reduction to one number."""
    padding = (0, -scores.shape[0] % LANES)
    return jnp.pad(scores, padding, constant_values=-jnp.inf).reshape(-1, LANES)


def _boundary(scores: Array, top_k: Array, top_p: Array) -> Threshold:
    """Of one position, scores f32[V]."""
    vocab, scores = scores.shape[0], _lanes(scores)
    ids, top = jnp.arange(scores.size).reshape(scores.shape), scores.max(0).max()
    all_kept = (jnp.float32(-jnp.inf), jnp.int32(scores.size))

    def search() -> Threshold:
        edge = jax.lax.cond(
            (top_k > 0) & (top_k < vocab),
            lambda: _prefix(scores, ids, jnp.ones_like(scores), top_k.astype(jnp.float32),
                            jnp.ones_like),
            lambda: all_kept)
        whole = jnp.exp(scores - top)
        mass = jnp.where(is_kept(scores, ids, *edge), whole, 0)
        edge = jax.lax.cond(
            top_p < 1,
            lambda: _prefix(scores, ids, mass, top_p * mass.sum(0).sum(),
                            lambda score: jnp.exp(score - top)),
            lambda: edge)
        kept = jnp.where(is_kept(scores, ids, *edge), mass, 0)
        return Threshold(*edge, kept.sum(0).sum() / whole.sum(0).sum())

    return jax.lax.cond((top_k > 0) | (top_p < 1), search,
                        lambda: Threshold(*all_kept, jnp.float32(1)))


@struct.dataclass
class _Bracket:
    """The last token of a prefix has a score in [low, high), both as `_ordered` has them."""

    low: Array  # u32[] of a token: the weight from it on is the target or more
    high: Array  # u32[] from here on it is less,
    above: Array  # f32[] this much
    last: Array  # bool[] `low` seems to be it: without one such token the weight would be less


def _prefix(scores: Array, ids: Array, weight: Array, target: Array,
            weigh: Callable[[Array], Array]) -> tuple[Array, Array]:
    """The last (score, id) of the tokens that, by falling score and then id, start before a weight.

    Bisection over scores. A look at all of them that finds weight enough goes on from the lowest
    token that it found, and once that seems to be the last one a further look proves it; so as many
    are needed as there are digits in how crowded the boundary is, and not in a float.

    Args:
      scores, weight: f32[n, LANES]; weights may be 0, and those of equal scores are equal or 0.
      ids: i32[n, LANES].
      target: f32[] > 0, less than the sum of weights or that sum.
      weigh: of a token with a score, f32[] -> f32[].
    """
    there = (weight > 0) & (scores == scores)  # not a number has no place in the order
    order = jnp.where(there, _ordered(scores), 0)  # 0 is the order of no number
    nobody = jnp.uint32(2**32 - 1)

    def middle(s: _Bracket) -> Array:
        between = _ordered(0.5 * _score(s.low) + 0.5 * _score(s.high))
        return jnp.where(s.last, s.low + 1,
                         jnp.clip(between, s.low + 1, jnp.maximum(s.high - 1, s.low + 1)))

    def look(s: _Bracket) -> _Bracket:
        bound = middle(s)
        inside = order >= bound
        found = jnp.where(inside, weight, 0).sum(0).sum()
        low = jnp.where(inside, order, nobody).min(0).min()
        near = found - weigh(_score(low)) < target
        enough = found >= target
        return _Bracket(
            low=jnp.where(enough, low, s.low), last=jnp.where(enough, near, s.last),
            high=jnp.where(enough, s.high, bound), above=jnp.where(enough, s.above, found))

    start = _Bracket(low=jnp.where(there, order, nobody).min(0).min(),
                     high=order.max(0).max() + 1, above=jnp.float32(0), last=jnp.bool_(False))
    end = jax.lax.while_loop(lambda s: middle(s) < s.high, look, start)
    tied = order == end.low
    count = tied.sum(0).sum()
    each = jnp.where(tied, weight, 0).max(0).max()
    wanted = jnp.clip(jnp.ceil((target - end.above) / each), 1, count).astype(jnp.int32)

    def among() -> Array:
        """The id of number `wanted`: bit by bit, the highest with fewer below it."""
        def bit(i: Array, start: Array) -> Array:
            higher = start | (jnp.int32(1) << (bits - 1 - i))
            return jnp.where((tied & (ids < higher)).sum(0).sum() < wanted, higher, start)

        bits = scores.size.bit_length()
        return jax.lax.fori_loop(0, bits, bit, jnp.int32(0))

    last = jax.lax.cond(wanted < count, among, lambda: jnp.where(tied, ids, -1).max(0).max())
    return _score(end.low), last.astype(jnp.int32)


def _ordered(x: Array) -> Array:
    """u32 that sorts as the floats do."""
    raw = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 equals 0
    return jnp.where(raw >> 31 == 1, ~raw, raw | jnp.uint32(1 << 31))


def _score(order: Array) -> Array:
    """The inverse of `_ordered`."""
    raw = jnp.where(order >> 31 == 1, order & jnp.uint32(2**31 - 1), ~order)
    return jax.lax.bitcast_convert_type(raw, jnp.float32)
