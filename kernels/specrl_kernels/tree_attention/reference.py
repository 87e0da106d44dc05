"""The oracle: one query at a time, its keys written out, in float32; shares no code."""

from typing import Any

import jax
import jax.numpy as jnp


def tree_attention_reference(operands: Any, *, scale: float, window: int | None) -> jax.Array:
    """See `api.tree_attention`."""
    q, row, node, tree_k, tree_v, parent, cache_k, cache_v, length, slot, prefix, _ = operands
    all_k, all_v = jnp.concatenate(cache_k, 3), jnp.concatenate(cache_v, 2)
    n, heads = tree_k.shape[1], q.shape[1]
    repeats = heads // tree_k.shape[2]
    cache_row = jnp.arange(length.shape[0]) if slot is None else slot

    def one(query: jax.Array, b: jax.Array, own: jax.Array) -> jax.Array:
        on_path = jnp.zeros(n, bool)
        at = own
        for _ in range(n):
            on_path = on_path.at[at].set(True)
            at = jnp.where(at > 0, parent[b, at], 0)
        depth = on_path.sum() - 1
        keys = [all_k[cache_row[b]].transpose(2, 0, 1), tree_k[b]]
        values = [all_v[cache_row[b]].transpose(1, 0, 2), tree_v[b]]
        context = jnp.arange(all_k.shape[3])
        seen = [context < length[b], on_path]
        place = [context, length[b] + jnp.where(on_path, jnp.cumsum(on_path) - 1, 0)]
        if prefix is not None:
            shares = (prefix.rows == b).any(1)
            which = jnp.argmax(shares)
            shared = jnp.arange(prefix.k.shape[3])
            count = jnp.where(shares.any(), prefix.length[which], 0)
            keys.insert(0, prefix.k[which].transpose(2, 0, 1))
            values.insert(0, prefix.v[which].transpose(1, 0, 2))
            seen.insert(0, shared < count)
            place.insert(0, shared - count)  # counted, as the others, from the row's own cache on
        visible = jnp.concatenate(seen)
        if window is not None:
            visible &= jnp.concatenate(place) > length[b] + depth - window
        keys, values = (jnp.repeat(jnp.concatenate(x), repeats, axis=1).astype(jnp.float32)
                        for x in (keys, values))
        score = jnp.einsum("he,she->hs", query.astype(jnp.float32), keys) * scale
        weight = jax.nn.softmax(jnp.where(visible[None], score, -jnp.inf), axis=-1)
        return jnp.einsum("hs,she->he", weight, values).astype(q.dtype)

    return jax.vmap(one)(q, row, node)
