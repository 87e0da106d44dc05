"""The arrays of a call of tree attention, as its implementations take them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Prefix(NamedTuple):
    """Contexts that precede the rows' own; a row in none of them has no prefix.

    A row's own cache then begins at the prefix's end: its slot s holds position length + s.
    """

    k: jax.Array  # f[P, G, E, S']
    v: jax.Array  # f[P, G, S', E]
    length: jax.Array  # i32[P]
    rows: jax.Array  # i32[P, M] the rows that share each, -1 fills; no row stands twice


class Context(NamedTuple):
    """The cached keys and values that rows read."""

    k: tuple[jax.Array, ...]  # f[slots, G, E, S] each, in segments along S
    v: tuple[jax.Array, ...]  # f[slots, G, S, E] each
    length: jax.Array  # i32[B] tokens of each row
    slot: Any  # i32[B] cache row of each row; None, which xla takes: row b reads cache row b


class Operands(NamedTuple):
    """The arguments of `api.tree_attention`, which has their shapes; caches are in segments."""

    q: jax.Array
    row: jax.Array | None
    node: jax.Array | None
    tree_k: jax.Array
    tree_v: jax.Array
    parent: jax.Array
    cache_k: tuple[jax.Array, ...]
    cache_v: tuple[jax.Array, ...]
    length: jax.Array
    slot: jax.Array | None = None
    prefix: Prefix | None = None
    layer: int | jax.Array | None = None

    @property
    def context(self) -> Context:
        """What rows read of their own caches, with a cache row for each."""
        rows = jnp.arange(self.length.shape[0], dtype=jnp.int32)
        return Context(self.cache_k, self.cache_v, self.length,
                       rows if self.slot is None else self.slot)
