"""Code that the kernels share: one block of the vocabulary, and its inputs at each position.

Blocks are independent: each has its own highest score, and `drawn.combine` joins them. So one
position fills a device, and a position costs one logarithm a token and one a block; with several
candidates two a token.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specrl_kernels import dispatch, noise, tuning
from specrl_kernels.dispatch import Target, Unsupported
from specrl_kernels.gumbel_argmax.drawn import Parts, Threshold, is_kept, log_rank, scale_of

FLOOR = -1e30  # highest score of a block without one: finite, so that differences are never NaN
NOBODY = 2**31 - 1  # the token of a block without candidates
MOST = 16  # candidates a block, whose loop is written out
SCALE, GREEDY, EDGE, FLOATS = 0, 1, 2, 4
FIRST, SECOND, LAST, START, INTEGERS = 0, 1, 2, 3, 4
TOP, TOTAL, RANK = 0, 1, 2  # of a block's output; ranks, then scores


class Positions(NamedTuple):
    """Scalars of each position that noise and threshold depend on."""

    floats: jax.Array  # f32[W, FLOATS]
    integers: jax.Array  # i32[W, INTEGERS]


def positions(temperature: jax.Array, key: jax.Array, position: jax.Array,
              threshold: Threshold | None, start: jax.Array) -> Positions:
    """Packs the scalars of each position; arguments as in `api.gumbel_argmax`.

    `start` is i32[] the first token of this device's part of the vocabulary.
    """
    scale, greedy = scale_of(temperature)
    first, second = (jax.lax.bitcast_convert_type(x, jnp.int32)
                     for x in noise.row_words(key, position))
    nothing = jnp.zeros_like(scale)
    edge = nothing if threshold is None else threshold.score
    last = jnp.zeros_like(first) if threshold is None else threshold.last
    return Positions(jnp.stack([scale, greedy.astype(jnp.float32), edge, nothing], 1),
                     jnp.stack([first, second, last, jnp.broadcast_to(start, last.shape)], 1))


def tuning_key(positions: int, vocab: int, count: int) -> dict[str, int]:
    """Returns the shape class by which kernels look up their tuning."""
    return tuning.shape_class(positions=positions, vocab=vocab, count=count)


def tuned(target: Target, name: str, logits: jax.Array, count: int) -> Mapping[str, int] | None:
    """Returns the given configuration, or that of the table; None if there is neither."""
    key = tuning_key(logits.shape[0], logits.shape[1], count)
    return dispatch.tuned(target, "gumbel_argmax", name, key, logits.dtype)


def width(count: int) -> int:
    """Returns the floats that a block writes for each position, a power of two.

    Raises:
      Unsupported: too many candidates.
    """
    if count > MOST:
        raise Unsupported(f"count = {count}: at most {MOST}")
    return 1 << (RANK + 2 * count - 1).bit_length()


OPERATIONS = 40  # of the hash, the scores and the race, for each token; counted in `race`


def estimate(logits: jax.Array, found: int) -> pl.CostEstimate:
    """Returns the work of a call that writes `found` numbers and tokens of each position."""
    w, vocab = logits.shape
    inputs = 4 * w * (FLOATS + INTEGERS)
    return pl.CostEstimate(
        flops=OPERATIONS * w * vocab, transcendentals=2 * w * vocab,
        bytes_accessed=logits.size * logits.dtype.itemsize + inputs + 8 * w * found)


def race(logits: jax.Array, ids: jax.Array, inside: jax.Array, floats: list[jax.Array],
         integers: list[jax.Array], count: int, truncated: bool
         ) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns a block's candidates. Runs inside kernels: no gather, no unsigned type, no reshape.

    Args:
      logits, ids, inside: [R, T]; a token outside of the vocabulary, or of this block, is no
        candidate and has no mass. Ids count from the first token of this device's part.
      floats, integers: FLOATS and INTEGERS arrays [R, 1].

    Returns:
      highest score, sum of exp(score - it), `count` ranks and `count` scores f32[R, 1]; and
      `count` tokens i32[R, 1].
    """
    greedy, ids = floats[GREEDY] > 0, ids + integers[START]
    score = jnp.where(inside, logits.astype(jnp.float32) * floats[SCALE], -jnp.inf)
    top = jnp.maximum(score.max(1, keepdims=True), jnp.float32(FLOOR))
    mass = jnp.exp(score - top)
    word = noise.element_bits(integers[FIRST], integers[SECOND], ids)
    if count > 1:
        there = score > -jnp.inf
        rank = log_rank(noise.exponential_of(word), mass, score - top)
    else:
        there = mass > 0
        rank = noise.exponential_of(word) / jnp.where(there, mass, jnp.float32(1))
    rank = jnp.where(greedy, -score, jnp.where(there, rank, jnp.inf))
    kept = inside
    if truncated:
        kept &= is_kept(score, ids, floats[EDGE], integers[LAST])
    rank = jnp.where(kept, rank, jnp.inf)
    ranks, scores, tokens = [], [], []
    for _ in range(count):
        best = rank.min(1, keepdims=True)
        token = jnp.where(rank == best, ids, NOBODY).min(1, keepdims=True)
        own = ids == token
        ranks.append(best)
        scores.append(jnp.where(own, score, -jnp.inf).max(1, keepdims=True))
        tokens.append(token)
        rank = jnp.where(own, jnp.inf, rank)
    return [top, mass.sum(1, keepdims=True), *ranks, *scores], tokens


def side_by_side(columns: list[jax.Array], lanes: jax.Array) -> jax.Array:
    """Returns [R, L] with the given columns [R, 1] first; `lanes` counts columns, i32[R, L]."""
    found = jnp.zeros(lanes.shape, columns[0].dtype)
    for i, column in enumerate(columns):
        found = jnp.where(lanes == i, column, found)
    return found


def parts(floats: jax.Array, tokens: jax.Array, count: int, vocab: int, axis: str | None) -> Parts:
    """Returns the parts of f32[C, W, width] and i32[C, W, width], as blocks write them.

    Where `axis` splits the vocabulary, `vocab` tokens a device, they are those of all devices.
    """
    if axis is not None:
        floats, tokens = jax.lax.all_gather((floats, tokens), axis, tiled=True)
        vocab *= jax.lax.axis_size(axis)
    return Parts(floats[..., TOP], floats[..., TOTAL], floats[..., RANK : RANK + count],
                 floats[..., RANK + count : RANK + 2 * count],
                 jnp.minimum(tokens[..., :count], vocab - 1))
