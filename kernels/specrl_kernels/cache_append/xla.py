"""The appends as slice updates of XLA, which a TPU's compiler runs row by row."""

import jax
import jax.numpy as jnp


def cache_append_xla(caches: tuple[jax.Array, ...], new: jax.Array, start: jax.Array,
                     count: jax.Array) -> tuple[jax.Array, ...]:
    """See `api.cache_append`. Slots from start[b] + count[b] to start[b] + n hold zeros."""
    within = jnp.arange(new.shape[0])[:, None] < count[None]
    new = jnp.where(within[:, None, None, None, None], new, 0)
    return tuple(_update(cache, new[:, :, i].transpose(4, 1, 2, 3, 0), start, 4)
                 for i, cache in enumerate(caches))


def row_append_xla(array: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array
                   ) -> jax.Array:
    """See `api.row_append`. Entries from start[b] + count[b] to start[b] + n are new's, too."""
    del count
    return _update(array, new, start, 1)


def _update(array: jax.Array, new: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(
        row, new, at, axis - 1))(array, new, start)
