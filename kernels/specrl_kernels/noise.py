"""Counter-based Gumbel noise: a function of (key, position, vocabulary index) and of nothing else.

Each element hashes its counter with both words of its row's key by two rounds of murmur3's 32-bit
finaliser, so the integer bits are the same on every backend and under every sharding. The uniform
keeps 32 bits at the end that wins: u = min((bits + 0.5) 2^-32, 1 - 2^-24), E = -log1p(-u),
G = -log(E) is large where u is small, and finite at both ends.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = 0x9E3779B1  # odd, 2^32 over the golden ratio: neighbouring counters land far apart


def finalize(h: jax.Array) -> jax.Array:
    """murmur3's fmix32 (Appleby, MurmurHash3, public domain) on u32, or on i32 of the same bits."""
    h = (h ^ _shifted(h, 16)) * _word(0x85EBCA6B, h)
    h = (h ^ _shifted(h, 13)) * _word(0xC2B2AE35, h)
    return h ^ _shifted(h, 16)


def _shifted(h: jax.Array, places: int) -> jax.Array:
    return jax.lax.shift_right_logical(h, jnp.full_like(h, places))


def _word(value: int, like: jax.Array) -> Any:
    """Returns a 32-bit NumPy constant in the dtype of `like`; products wrap around in both."""
    return np.uint32(value).view(like.dtype)


def row_words(key: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two words u32[...] with which a row is hashed; arguments as in `bits`."""
    place = position.astype(jnp.uint32) * jnp.uint32(_GOLDEN) + jnp.uint32(0x2545F491)
    first = finalize(key[..., 0] ^ finalize(place))
    return first, finalize(key[..., 1] + first)


def element_bits(first: jax.Array, second: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the hash of elements by `row_words`; all u32, or all i32 in kernels; broadcasts."""
    return finalize(finalize(index * _word(_GOLDEN, index) + second) ^ first)


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
    counter = index.astype(jnp.uint32).reshape((1,) * first.ndim + (-1,))
    return element_bits(first[..., None], second[..., None], counter)


def exponential_of(word: jax.Array) -> jax.Array:
    """Returns standard exponential noise f32, between 2^-33 and 17, of hashes u32 or i32."""
    u = (_as_float(word) + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log1p(-jnp.minimum(u, jnp.float32(1 - 2.0**-24)))


def _as_float(word: jax.Array) -> jax.Array:
    """Returns 32 bits, read as unsigned, as f32: i32 by halves, whose sum rounds once, as u32's."""
    if word.dtype == jnp.uint32:
        return word.astype(jnp.float32)
    high, low = _shifted(word, 16), word & _word(0xFFFF, word)
    return high.astype(jnp.float32) * jnp.float32(1 << 16) + low.astype(jnp.float32)


def exponential(key: jax.Array, position: jax.Array, index: jax.Array) -> jax.Array:
    """Returns standard exponential noise E f32[..., V]; arguments as in `bits`."""
    return exponential_of(bits(key, position, index))


def gumbel(key: jax.Array, position: jax.Array, index: jax.Array) -> jax.Array:
    """Returns standard Gumbel noise G = -log(E) f32[..., V]; arguments as in `bits`."""
    return -jnp.log(exponential(key, position, index))
