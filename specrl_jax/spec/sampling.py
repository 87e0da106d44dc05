"""The actor's draw: y = argmax_v(logp[v] + G[v]) of the processed distribution.

Logits are [V, W], as the head makes them. The draw itself is the operation `gumbel_argmax`;
truncation is a threshold found by bisection over float bits, without a sort, and only in rounds in
which some row asks for it.
"""

import jax
import jax.numpy as jnp
from flax import struct
from specrl_kernels.gumbel_argmax import Drawn, Threshold, gumbel_argmax, scale_of

from specrl_jax.structs import Array


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
    """The boundary of top-k and then top-p; a position that asks for neither keeps exactly 1."""
    vocab = scores.shape[0]
    order = _ordered(scores)
    ones = jnp.ones_like(scores)
    in_top_k = _prefix(order, ones, jnp.where(top_k > 0, top_k, vocab).astype(jnp.float32))
    whole = jnp.exp(scores - scores.max(0, keepdims=True))
    mass = jnp.where(in_top_k, whole, 0)
    target = jnp.where(top_p < 1, top_p, jnp.inf) * mass.sum(0)
    kept = in_top_k & _prefix(order, mass, target)
    edge = jnp.where(kept, scores, jnp.inf).min(0)
    ids = jnp.arange(vocab)[:, None]
    last = jnp.where(kept & (scores == edge[None]), ids, -1).max(0)
    kept_mass = jnp.where(kept, mass, 0).sum(0) / whole.sum(0)
    kept_mass = jnp.where((top_k > 0) | (top_p < 1), kept_mass, 1.0)
    return Threshold(edge, last.astype(jnp.int32), kept_mass)


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
