"""Checksums of trees of arrays, computed on the device."""


import jax
import jax.numpy as jnp

from specrl_jax.structs import Array, PyTree


@jax.jit
def sums(tree: PyTree) -> tuple[Array, Array, Array]:
    """Returns (checksum u32[], all finite bool[], all zero bool[]) of a tree.

    The checksum depends on the order of elements.
    """
    checksum, finite, zero = jnp.uint32(0), jnp.bool_(True), jnp.bool_(True)
    for salt, leaf in enumerate(jax.tree.leaves(tree), 1):
        bits = jnp.asarray(leaf)
        zero &= (bits == 0).all()  # of either sign
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            finite &= jnp.isfinite(bits).all()
            bits = jax.lax.bitcast_convert_type(
                bits, jnp.uint32 if leaf.dtype.itemsize == 4 else jnp.uint16)
        bits = bits.astype(jnp.uint32)
        index = jnp.zeros(bits.shape, jnp.uint32)  # row-major; needs no gather of sharded arrays
        for axis, size in enumerate(bits.shape):
            place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            index = index * jnp.uint32(size) + place
        index = index + jnp.uint32(salt * 0x9E3779B1 % 2**32)
        weight = index * jnp.uint32(0x85EBCA6B) | 1
        checksum += (bits * weight).sum(dtype=jnp.uint32)
    return checksum, finite, zero


@jax.jit
def program(tree: PyTree) -> Array:
    """Returns the checksum u32[] of a tree."""
    return sums(tree)[0]  # XLA drops what is not read


@jax.jit
def summary(tree: PyTree) -> tuple[Array, Array, Array]:
    """Returns (checksum u32[], all finite bool[], all zero bool[]) of floating-point values."""
    _, finite, zero = sums([leaf for leaf in jax.tree.leaves(tree)
                               if jnp.issubdtype(leaf.dtype, jnp.floating)])
    return sums(tree)[0], finite, zero


def checksum(tree: PyTree) -> int:
    """Returns the checksum of a tree of arrays; it depends on values and their order."""
    return int(program(tree))
