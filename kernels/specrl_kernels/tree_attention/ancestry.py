"""Which nodes a node sees, as bits: O(B n log n) work and n bits a node, never a mask [n, n]."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

WORD = 32  # bits of a word


def visible_bits(parent: jax.Array, window: int | None = None) -> jax.Array:
    """Bit j of a node's words: whether it sees node j, one of its ancestors or itself.

    Every node jumps along its path in powers of two, and collects the nodes in between.

    Args:
      parent: i32[B, n]; parent[i] < i, the root's is ignored.
      window: number of nodes of its path that a node sees, itself included; None sees all.

    Returns:
      i32[B, n, C], C = ceil(n / 32).
    """
    b, n = parent.shape
    levels = n if window is None else min(window, n)
    index = jnp.arange(n + 1)
    words = -(-n // WORD)
    own = jnp.where((index[:, None] // WORD == jnp.arange(words)[None]) & (index < n)[:, None],
                    jnp.left_shift(1, index % WORD)[:, None], 0).astype(jnp.int32)
    passed = jnp.broadcast_to(own[None], (b, n + 1, words))  # nodes on the next `step` levels
    jump = jnp.concatenate([parent, parent[:, :1]], 1).at[:, 0].set(n).at[:, n].set(n)
    seen = jnp.zeros_like(passed)
    at = jnp.broadcast_to(index[None], (b, n + 1))  # place n stands above the root and sees nothing
    for bit in range(levels.bit_length()):
        if levels >> bit & 1:
            seen |= jnp.take_along_axis(passed, at[..., None], 1)
            at = jnp.take_along_axis(jump, at, 1)
        passed |= jnp.take_along_axis(passed, jump[..., None], 1)
        jump = jnp.take_along_axis(jump, jump, 1)
    return seen[:, :n]


def depth(parent: jax.Array) -> jax.Array:
    """i32[B, n] edges between a node and its root."""
    bits = visible_bits(parent)
    return jax.lax.population_count(bits).sum(-1, dtype=jnp.int32) - 1


def is_visible(words: Sequence[jax.Array], columns: jax.Array) -> jax.Array:
    """bool[Q, n] from the C words i32[Q, 1] of Q queries; `columns` i32[Q, n] counts from 0.

    Runs inside kernels: no gather, no unsigned type, no reshape.
    """
    word = words[0] + jnp.zeros_like(columns)
    for i, later in enumerate(words[1:], 1):
        word = jnp.where(columns >= i * WORD, later, word)
    return (jax.lax.shift_right_logical(word, columns % WORD) & 1) == 1
