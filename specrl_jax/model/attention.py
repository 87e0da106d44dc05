"""Attention within rows of tokens that hold several sequences, without T x T scores in memory.

A token attends to tokens of its own segment and of its prefix, up to its own position. Segment -1
is padding.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from specrl_kernels import dispatch

from specrl_jax.model.flash import flash_attention
from specrl_jax.model.layers import Index
from specrl_jax.structs import Array, PyTree

QUERIES_AT_ONCE = 512  # whose scores exist at once
Attend: TypeAlias = Callable[[Index, Array, Array, Array], Array]
"""(index of the layer, q [G, R, E, ...], k and v [G, E, ...]) -> [G, R, E, ...]"""


def segment_attention(position: Array, segment: Array, prefix: Array | None = None) -> Attend:
    """Returns attention within rows, for q, k and v over tokens [B, T].

    Long rows without shared prompts run by a kernel of the platform that is traced for, if it has
    one; others by chunks of queries.

    Args:
      position: i32[B, T], of each token in its sequence.
      segment: i32[B, T].
      prefix: i32[B, T], a further segment that each token reads: that of a prompt which several
        responses share. None: a prompt belongs to the segment of its one response.
    """
    total = position.shape[1]
    platform = dispatch.traced_for().platform
    if prefix is None and total > QUERIES_AT_ONCE and platform in ("tpu", "gpu"):
        return flash_attention(platform, segment)
    prefix = segment if prefix is None else prefix

    def some(k: Array, v: Array, q: Array, at: tuple[Array, ...]) -> Array:
        """Runs the queries q [G, R, E, B, t] that are at positions, segments, prefixes [B, t]."""
        position_q, segment_q, prefix_q = (a[:, :, None] for a in at)
        key = segment[:, None, :]
        visible = (key == segment_q) | (key == prefix_q)
        visible &= position[:, None, :] <= position_q
        score = jnp.einsum("grebt,gebs->bgrts", q, k, preferred_element_type=jnp.float32)
        score = jnp.where(visible[:, None, None], score * q.shape[2] ** -0.5, -1e30)
        weight = jax.nn.softmax(score, -1).astype(v.dtype)
        return jnp.einsum("bgrts,gebs->grebt", weight, v)

    def attend(index: Index, q: Array, k: Array, v: Array) -> Array:
        return in_chunks(functools.partial(some, k, v), QUERIES_AT_ONCE, q,
                         (position, segment, prefix))

    return attend


def in_chunks(function: Callable[..., Array], size: int, *args: PyTree) -> Array:
    """Returns function(*args) of arrays [..., T], run on `size` of T after the other.

    The backward pass runs each chunk again, so that what one makes never exists for all.
    """
    total = jax.tree.leaves(args)[0].shape[-1]
    if total <= size:
        return function(*args)
    count = -(-total // size)

    def split(a: Array) -> Array:
        """[count, ..., size] of [..., T], padded."""
        a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, count * size - total)])
        return jnp.moveaxis(a.reshape(*a.shape[:-1], count, size), -2, 0)

    chunk = jax.checkpoint(lambda part: function(*part))
    chunks = jax.lax.map(chunk, jax.tree.map(split, args))
    return jnp.moveaxis(chunks, 0, -2).reshape(*chunks.shape[1:-1], -1)[..., :total]
