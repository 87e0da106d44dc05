"""Sums over the bits of arrays, by which trees of weights are told apart."""

from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.structs import Array


@jax.jit
def sums(tree: Any) -> tuple[Array, Array, Array, Array]:
    """(bag, checksum u32[], all finite, all zero) of arrays of any dtype."""
    bag = checksum = jnp.uint32(0)
    finite = zero = jnp.bool_(True)
    for salt, leaf in enumerate(jax.tree.leaves(tree), 1):
        bits = jnp.asarray(leaf)
        zero &= (bits == 0).all()  # of either sign
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            finite &= jnp.isfinite(bits).all()
            bits = jax.lax.bitcast_convert_type(
                bits, jnp.uint32 if leaf.dtype.itemsize == 4 else jnp.uint16)
        bits = bits.astype(jnp.uint32)
        place = _place(bits.shape)
        weight = (place + jnp.uint32(salt * 0x9E3779B1 % 2**32)) * jnp.uint32(0x85EBCA6B) | 1
        bag += bits.sum(dtype=jnp.uint32)
        checksum += (bits * weight).sum(dtype=jnp.uint32)
    return bag, checksum, finite, zero


def _place(shape: tuple[int, ...]) -> Array:
    """u32 row-major index of each element, from its coordinates: shards need not be gathered."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return place


@jax.jit
def _checksum(tree: Any) -> Array:
    return sums(tree)[1]  # a third of the time of all of them


def checksum(tree: Any) -> int:
    """Of a tree of arrays, by value and place."""
    return int(_checksum(tree))


def identity(params: Any) -> str:
    """Of weights as rollouts read them: their dtype and checksum."""
    return f"{jax.tree.leaves(params)[0].dtype} {checksum(params):08x}"
