"""What kernels keep of parts of a vocabulary, and the draw that they make together."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_kernels.gumbel_argmax import Drawn
from specrl_kernels.gumbel_argmax.drawn import finish

LOWEST = -3e38  # below every score; finite, so that differences are numbers


class Parts(NamedTuple):
    """Of each of n parts of the vocabulary, what a draw needs."""

    best: jax.Array  # f32[W, n] highest perturbed score, LOWEST for none
    token: jax.Array  # i32[W, n] its token
    score: jax.Array  # f32[W, n] its score
    top: jax.Array  # f32[W, n] highest score
    total: jax.Array  # f32[W, n] sum of exp(score - top)


def join(parts: Parts) -> Parts:
    """Returns the n parts as one, in one pass; equal perturbed scores give the lower token."""
    nothing = Parts(*(jnp.asarray(x, y.dtype) for x, y in zip(
        (LOWEST, jnp.iinfo(jnp.int32).max, LOWEST, LOWEST, 0), parts, strict=True)))
    joined = jax.lax.reduce(parts, nothing, _join, (1,))
    return jax.tree.map(lambda x: x[:, None], joined)


def _join(one: Parts, other: Parts) -> Parts:
    ahead = (one.best > other.best) | ((one.best == other.best) & (one.token < other.token))
    best, token, score = (jnp.where(ahead, x, y) for x, y in zip(one[:3], other[:3], strict=True))
    top = jnp.maximum(one.top, other.top)
    total = one.total * jnp.exp(one.top - top) + other.total * jnp.exp(other.top - top)
    return Parts(best, token, score, top, total)


def draw(parts: Parts, greedy: jax.Array, axis: str | None) -> Drawn:
    """Returns the draw from all parts, of all devices of the mesh axis `axis` if there is one.

    Args:
      greedy: bool[W] whether perturbed scores have no noise.
    """
    one = join(parts)
    if axis is not None:
        one = join(_gather(one, axis))
    score = one.score - one.top
    raced = jnp.where(greedy[:, None], score, one.best - one.top)
    return finish(raced, one.token, score, one.total[:, 0], greedy, None)


def _gather(one: Parts, axis: str) -> Parts:
    """Returns each device's part, by a single collective."""
    cast = jax.lax.bitcast_convert_type
    bits = jnp.stack([cast(x, jnp.int32) for x in one])
    bits = jax.lax.all_gather(bits, axis, axis=2, tiled=True)
    return Parts(*(cast(bits[i], x.dtype) for i, x in enumerate(one)))
