"""The online softmax: its step inside kernels, and the combination of partial results.

A partial result of queries over some keys is (highest score, sum of weights, weighted values).
Milakov and Gimelshein 2018 (arXiv 1805.02867); the combination of splits is Flash-Decoding's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

FLOOR = -1e30  # highest score of no key at all: finite, so that differences are never NaN
HIDDEN = -2e30  # score of a hidden key: its weight exp(HIDDEN - FLOOR) is exactly 0


class Partial(NamedTuple):
    """The softmax of queries over a part of their keys."""

    top: jax.Array  # f32[..., Q, 1] highest score, FLOOR if no key was seen
    total: jax.Array  # f32[..., Q, 1] sum of exp(score - top)
    out: jax.Array  # f32[..., Q, E] values weighted by exp(score - top)


def empty(queries: int, size: int) -> Partial:
    """Returns the result over no key, with which every kernel's loop starts."""
    return Partial(jnp.full((queries, 1), FLOOR, jnp.float32),
                   jnp.zeros((queries, 1), jnp.float32), jnp.zeros((queries, size), jnp.float32))


def dot(a: jax.Array, b: jax.Array, contract: int = 0) -> jax.Array:
    """Returns the f32 product of a[Q, x] with b[x, y], or with b[y, x] if `contract` is 1.

    float32 asks for the full precision: the default is bfloat16 on a TPU and TF32 on a GPU.
    """
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, (((1,), (contract,)), ((), ())), precision=exact,
                               preferred_element_type=jnp.float32)


def add_keys(partial: Partial, score: jax.Array, visible: jax.Array, value: jax.Array,
             contract: int = 0) -> Partial:
    """Adds keys with scores f32[Q, T], seen where visible bool[Q, T], and values [T, E], or [E, T]
    if `contract` is 1."""
    score = jnp.where(visible, score, HIDDEN)
    top = jnp.maximum(partial.top, score.max(1, keepdims=True))
    rescale, weight = jnp.exp(partial.top - top), jnp.exp(score - top)
    return Partial(top, partial.total * rescale + weight.sum(1, keepdims=True),
                   partial.out * rescale + dot(weight.astype(value.dtype), value, contract))


def join(one: Partial, other: Partial) -> Partial:
    """Combines two results of the same queries over different keys. Runs inside kernels."""
    top = jnp.maximum(one.top, other.top)
    mine, theirs = jnp.exp(one.top - top), jnp.exp(other.top - top)
    return Partial(top, one.total * mine + other.total * theirs,
                   one.out * mine + other.out * theirs)


def combine(parts: Partial) -> Partial:
    """Combines the partial results that are stacked along the first axis."""
    top = parts.top.max(0)
    rescale = jnp.exp(parts.top - top[None])
    return Partial(top, (parts.total * rescale).sum(0), (parts.out * rescale).sum(0))


def stack(parts: list[Partial]) -> Partial:
    """Stacks partial results of the same queries along a new first axis."""
    return Partial(*(jnp.stack(arrays) for arrays in zip(*parts, strict=True)))


def finish(partial: Partial) -> jax.Array:
    """Returns the attention f32[..., Q, E]; every query must have seen a key."""
    return partial.out / partial.total
