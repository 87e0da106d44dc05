"""Truncation by top-k, top-p and min-p: a threshold, so that nothing sorts the vocabulary.

A CPU searches among the highest scores or by bisection, one position at a time. Accelerators, and
devices that share a vocabulary, determine the bits of all thresholds in a fixed number of passes.
Of equal scores the lower id comes first.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from specrl_kernels.gumbel_argmax import Threshold, first_id, is_kept

from specrl_jax.sharding import straight_line
from specrl_jax.structs import Array

LANES = 128
FEW = 128  # highest scores that a CPU tries before it searches all
DIGIT = 4  # bits of a threshold that one pass over the vocabulary finds


def threshold(scores: Array, top_k: Array, top_p: Array, axis: str | None = None,
              min_p: float = 0.0) -> Threshold:
    """Returns the boundary of top-k, top-p and min-p; without them a position keeps exactly 1.

    A CPU computes one position at a time, so that its scores stay in the cache, and skips those
    without truncation.

    Args:
      scores: f32[W, V] logits over the temperature, whole on this device, or its part of them.
      top_k: i32[W], 0 is off; top_p: f32[W], 1 is off.
      axis: the mesh axis that splits the vocabulary, see `gumbel_argmax`.
      min_p: least probability of a token that is kept, in units of the highest one
        (arXiv:2407.01082); 0 is off.
    """
    if straight_line() or axis is not None:
        edge = _by_digits(scores, top_k, top_p, axis)
    else:
        edge = jax.lax.map(lambda one: _among_the_highest(*one), (scores, top_k, top_p))
    return _raised(edge, scores, min_p, axis) if min_p else edge


def _raised(edge: Threshold, scores: Array, min_p: float, axis: str | None) -> Threshold:
    """Returns the boundary `edge`, raised to min-p where that is higher."""
    vocab = scores.shape[1]
    top = jax.lax.pmax(scores.max(1), axis) if axis else scores.max(1)
    floor = top + jnp.log(jnp.float32(min_p))
    score = jnp.maximum(edge.score, floor)
    last = jnp.where(floor > edge.score, jnp.int32(2**31 - 1), edge.last)
    ids = (first_id(vocab, axis) + jnp.arange(vocab))[None]
    whole = jnp.exp(scores - top[:, None])
    kept = jnp.where(is_kept(scores, ids, score[:, None], last[:, None]), whole, 0)
    part, total = _totals([kept, whole], axis)
    return Threshold(score, last, part / total)


def _by_digits(scores: Array, top_k: Array, top_p: Array, axis: str | None) -> Threshold:
    """Searches all positions at once; a sum or a highest score is that of all devices' parts."""
    vocab, devices = scores.shape[1], jax.lax.axis_size(axis) if axis else 1
    top, ids = scores.max(1), (first_id(vocab, axis) + jnp.arange(vocab))[None]
    whole = jnp.exp(scores - (jax.lax.pmax(top, axis) if axis else top)[:, None])
    there = scores == scores  # NaN has no order
    order = jnp.where(there, _ordered(scores), 0)

    def cut(edge: tuple[Array, Array], cuts: Array, weight: Array, target: Array
            ) -> tuple[tuple[Array, Array], Array]:
        cut_at = _last_by_digits(order, ids, weight, target, vocab * devices, axis)
        score, last = (jnp.where(cuts, a, b) for a, b in zip(cut_at, edge, strict=True))
        kept = is_kept(scores, ids, score[:, None], last[:, None])
        return (score, last), jnp.where(there & kept, whole, 0)

    edge = jnp.full_like(top, -jnp.inf), jnp.full(top.shape, vocab * devices)
    edge, mass = cut(edge, (top_k > 0) & (top_k < vocab * devices), there.astype(whole.dtype),
                     top_k.astype(whole.dtype))
    edge, kept = cut(edge, top_p < 1, mass, top_p * _totals([mass], axis)[0])
    part, total = _totals([kept, whole], axis)
    return Threshold(*edge, part / total)


def _last_by_digits(order: Array, ids: Array, weight: Array, target: Array, vocab: int,
                    axis: str | None) -> tuple[Array, Array]:
    """Returns what `_prefix` does, of each position; `order` u32[W, V] are its scores."""
    def reaches(bounds: list[Array]) -> Array:  # u32[W] -> bool[W]
        return _totals([jnp.where(order >= bound[:, None], weight, 0) for bound in bounds],
                       axis) >= target[None]

    low = _greatest(reaches, 32, target)
    tied = (order == low[:, None]) & (weight > 0)
    one, count, above = _totals([jnp.where(tied, weight, 0), tied.astype(weight.dtype), jnp.where(
        order > low[:, None], weight, 0)], axis)
    each = one / jnp.maximum(count, 1)
    wanted = jnp.clip(jnp.ceil((target - above) / jnp.where(each > 0, each, 1)), 1, count)

    def lacks(bounds: list[Array]) -> Array:
        return _totals([(tied & (ids < bound[:, None].astype(ids.dtype))).astype(weight.dtype)
                        for bound in bounds], axis) < wanted[None]

    return _score(low), _greatest(lacks, vocab.bit_length(), target).astype(jnp.int32)


def _greatest(holds: Callable[[list[Array]], Array], bits: int, like: Array) -> Array:
    """Returns the greatest u32[W] below 2^bits for which `holds`; it does for 0.

    The loop is of a known length, so it asks no host. `holds` is asked of several numbers at once,
    and does not hold above one for which it does not.
    """
    steps = -(-bits // DIGIT)

    def digit(i: Array, value: Array) -> Array:
        shift = (DIGIT * (steps - 1 - i)).astype(jnp.uint32)
        bounds = [value + (jnp.uint32(j) << shift) for j in range(1, 1 << DIGIT)]
        return value + (holds(bounds).sum(0).astype(jnp.uint32) << shift)

    return jax.lax.fori_loop(0, steps, digit, jnp.zeros(like.shape, jnp.uint32))


def _totals(parts: list[Array], axis: str | None) -> Array:
    """Returns the sums f32[parts, W] of parts f32[W, V] over the whole vocabulary."""
    sums = jnp.stack([part.sum(1) for part in parts])
    return jax.lax.psum(sums, axis) if axis else sums


def _among_the_highest(scores: Array, top_k: Array, top_p: Array) -> Threshold:
    """Computes `_boundary`, for peaked distributions from the FEW highest scores alone.

    A CPU selects those in a few passes if there is one position, and by a sort if there are more.
    """
    used = (top_k > 0) | (top_p < 1)
    few = min(FEW, scores.shape[0])

    def near() -> tuple[Array, Threshold]:
        known = jnp.where(scores == 0, 0.0, scores)  # -0 would be below 0
        best, ids = jax.lax.top_k(known, few)  # of equals the lower id first
        lanes = _lanes(known)
        top = lanes.max(0).max()  # `best[0]` would make XLA sort
        mass, whole = jnp.exp(best - top), jnp.exp(lanes - top).sum(0).sum()
        every, bounded = (top_k <= 0) | (top_k >= scores.shape[0]), top_k <= few
        kept = every | (jnp.arange(few) < top_k)
        target = top_p * jnp.where(every, whole, jnp.where(kept, mass, 0).sum())
        kept &= (top_p == 1) | (jnp.cumsum(mass) - mass < target)
        last = jnp.maximum(kept.sum() - 1, 0)
        certain = jnp.where(every, last < few - 1, bounded) & (whole > 0)  # False if a score is NaN
        mass = jnp.where(jnp.arange(few) <= last, mass, 0).sum()
        return certain, Threshold(best[last], ids[last], mass / whole)

    certain, edge = jax.lax.cond(used, near, lambda: (
        jnp.bool_(False), Threshold(jnp.float32(0), jnp.int32(0), jnp.float32(0))))
    return jax.lax.cond(certain, lambda: edge, lambda: _boundary(scores, top_k, top_p))


def _lanes(scores: Array) -> Array:
    """Reshapes f32[V] to f32[n, LANES]: a CPU does not vectorise a reduction to one number."""
    padding = (0, -scores.shape[0] % LANES)
    return jnp.pad(scores, padding, constant_values=-jnp.inf).reshape(-1, LANES)


def _boundary(scores: Array, top_k: Array, top_p: Array) -> Threshold:
    """Searches all scores f32[V] of one position."""
    vocab, scores = scores.shape[0], _lanes(scores)
    ids, top = jnp.arange(scores.size).reshape(scores.shape), scores.max(0).max()
    all_kept = (jnp.float32(-jnp.inf), jnp.int32(scores.size))

    def search() -> Threshold:
        edge = jax.lax.cond((top_k > 0) & (top_k < vocab),
                            lambda: _prefix(scores, ids, jnp.ones_like(scores),
                                            top_k.astype(jnp.float32), jnp.ones_like),
                            lambda: all_kept)
        whole = jnp.exp(scores - top)
        mass = jnp.where(is_kept(scores, ids, *edge), whole, 0)
        edge = jax.lax.cond(top_p < 1,
                            lambda: _prefix(scores, ids, mass, top_p * mass.sum(0).sum(),
                                            lambda score: jnp.exp(score - top)), lambda: edge)
        kept = jnp.where(is_kept(scores, ids, *edge), mass, 0)
        return Threshold(edge[0], edge[1], kept.sum(0).sum() / whole.sum(0).sum())

    return jax.lax.cond((top_k > 0) | (top_p < 1), search,
                        lambda: Threshold(*all_kept, jnp.float32(1)))


class _Bracket(struct.PyTreeNode):
    """The last token of a prefix has a score in [low, high), mapped by `_ordered`."""

    low: Array  # u32[] score of a token; tokens from it upwards weigh the target or more
    high: Array  # u32[] tokens from here upwards weigh less than the target,
    above: Array  # f32[] namely this much
    last: Array  # bool[] `low` seems to be the last: without one such token the weight is too small


def _prefix(scores: Array, ids: Array, weight: Array, target: Array,
            weigh: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Returns (score, id) of the last token whose predecessors weigh less than `target`.

    Tokens are ordered by falling score, then id. Bisection over scores: a pass that collects
    enough weight continues from the lowest token in it, and once that appears to be the last one, a
    further pass confirms it. So the number of passes depends on how crowded the boundary is.

    Args:
      scores, weight, ids: [n, LANES]; weights of equal scores are equal or 0.
      target: f32[] > 0, at most the sum of weights.
      weigh: weight of a token with a given score, f32[] -> f32[].
    """
    there = (weight > 0) & (scores == scores)  # NaN has no order
    order = jnp.where(there, _ordered(scores), 0)  # no number is mapped to 0
    nobody = jnp.uint32(2**32 - 1)

    def middle(s: _Bracket) -> Array:
        between = _ordered(0.5 * _score(s.low) + 0.5 * _score(s.high))
        return jnp.where(s.last, s.low + 1,
                         jnp.clip(between, s.low + 1, jnp.maximum(s.high - 1, s.low + 1)))

    def look(s: _Bracket) -> _Bracket:
        bound = middle(s)
        inside = order >= bound
        total = jnp.where(inside, weight, 0).sum(0).sum()
        low = jnp.where(inside, order, nobody).min(0).min()
        near = total - weigh(_score(low)) < target
        enough = total >= target
        return _Bracket(
            low=jnp.where(enough, low, s.low), last=jnp.where(enough, near, s.last),
            high=jnp.where(enough, s.high, bound), above=jnp.where(enough, s.above, total))

    start = _Bracket(low=jnp.where(there, order, nobody).min(0).min(),
                     high=order.max(0).max() + 1, above=jnp.float32(0), last=jnp.bool_(False))
    end = jax.lax.while_loop(lambda s: middle(s) < s.high, look, start)
    tied = order == end.low
    count = tied.sum(0).sum()
    each = jnp.where(tied, weight, 0).max(0).max()
    wanted = jnp.clip(jnp.ceil((target - end.above) / each), 1, count).astype(jnp.int32)

    def among() -> Array:
        """Returns the id of tied token number `wanted`, bit by bit."""
        def bit(i: Array, start: Array) -> Array:
            higher = start | (jnp.int32(1) << (bits - 1 - i))
            return jnp.where((tied & (ids < higher)).sum(0).sum() < wanted, higher, start)

        bits = scores.size.bit_length()
        return jax.lax.fori_loop(0, bits, bit, jnp.int32(0))

    last = jax.lax.cond(wanted < count, among, lambda: jnp.where(tied, ids, -1).max(0).max())
    return _score(end.low), last.astype(jnp.int32)


def _ordered(x: Array) -> Array:
    """Maps floats to u32 that sort alike."""
    raw = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 equals 0
    return jnp.where(raw >> 31 == 1, ~raw, raw | jnp.uint32(1 << 31))


def _score(order: Array) -> Array:
    """Inverts `_ordered`."""
    raw = jnp.where(order >> 31 == 1, order & jnp.uint32(2**31 - 1), ~order)
    return jax.lax.bitcast_convert_type(raw, jnp.float32)
