"""Counter-based Gumbel noise: a function of (key, position, vocabulary index) and of nothing else.

Each element hashes its counter with both words of its row's key by two rounds of murmur3's 32-bit
finaliser, so the integer bits are the same on every backend and under every sharding. The uniform
keeps 32 bits at the end that wins: u = min((bits + 0.5) 2^-32, 1 - 2^-24), E = -log1p(-u),
G = -log(E) is large where u is small, and finite at both ends.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Odd, 2^32 over the golden ratio: neighbouring counters land far apart.
_GOLDEN = np.uint32(0x9E3779B1)


def _finalize(h: jax.Array) -> jax.Array:
    """Returns murmur3's fmix32 of u32 (Appleby, MurmurHash3, public domain)."""
    h = (h ^ h >> 16) * jnp.uint32(0x85EBCA6B)
    h = (h ^ h >> 13) * jnp.uint32(0xC2B2AE35)
    return h ^ h >> 16


def bits(key: jax.Array, position: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the u32 hash of (key, position, index).

    Args:
      key: u32[..., 2].
      position: i32[...] index of the token being drawn; 0 is the first of the response.
      index: i32[V] vocabulary indices.

    Returns:
      u32[..., V].
    """
    first, second = row_words(key, position)
    return _bits(first[..., None], second[..., None], index.reshape((1,) * first.ndim + (-1,)))


def row_words(key: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two u32[...] that a row's noise depends on; arguments as in `bits`."""
    place = position.astype(jnp.uint32) * _GOLDEN + jnp.uint32(0x2545F491)
    first = _finalize(key[..., 0] ^ _finalize(place))
    return first, _finalize(key[..., 1] + first)


def _bits(first: jax.Array, second: jax.Array, index: jax.Array) -> jax.Array:
    counter = index.astype(jnp.uint32) * _GOLDEN
    return _finalize(_finalize(counter + second) ^ first)


def exponential(key: jax.Array, position: jax.Array, index: jax.Array) -> jax.Array:
    """Returns standard exponential noise E f32[..., V], in (2^-33, 17); arguments as in `bits`."""
    return _exponential(bits(key, position, index).astype(jnp.float32))


def exponential_of(first: jax.Array, second: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `exponential` of `row_words` and i32 indices, which broadcast; for kernels."""
    hashed = _bits(first, second, index)
    # Mosaic converts no u32. Both halves are exact, so the sum is rounded once, as a conversion is.
    high, low = ((hashed >> jnp.uint32(n) & jnp.uint32(0xFFFF)).astype(jnp.int32).astype(
        jnp.float32) for n in (16, 0))
    return _exponential(high * jnp.float32(65536) + low)


def _exponential(bits: jax.Array) -> jax.Array:
    u = (bits + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log1p(-jnp.minimum(u, jnp.float32(1 - 2.0**-24)))


def gumbel(key: jax.Array, position: jax.Array, index: jax.Array) -> jax.Array:
    """Returns standard Gumbel noise G = -log(E) f32[..., V]; arguments as in `bits`."""
    return -jnp.log(exponential(key, position, index))
