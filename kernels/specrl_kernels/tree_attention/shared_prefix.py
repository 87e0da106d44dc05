"""A prompt's keys and values that several rows share.

Of the S' E G numbers of `k` and of `v`, each implementation reads those below `length`, and whole
chunks or blocks only. `xla` reads them once a group. `pallas` does, too, up to the rows whose
queries fit into VMEM (`pallas._rows_together`); more rows are another reading. The GPU kernels read
them once for each tile of `gpu.for_groups`, up to 128 queries: ceil(M n R / tile) times for M rows
of n nodes and R heads to a key, by programs that run side by side and meet in the L2 cache.
"""

import jax
import jax.numpy as jnp

from specrl_kernels.tree_attention.operands import Prefix
from specrl_kernels.tree_attention.packing import Rows
from specrl_kernels.tree_attention.softmax import FLOOR, Partial


def split_members(prefix: Prefix, limit: int) -> tuple[jax.Array, jax.Array]:
    """(rows i32[P', M'], which prefix each P' reads i32[P']), with M' <= `limit` rows at a time."""
    p, m = prefix.rows.shape
    chunks = -(-m // limit)
    size = -(-m // chunks)
    rows = jnp.pad(prefix.rows, ((0, 0), (0, chunks * size - m)), constant_values=-1)
    return rows.reshape(p * chunks, size), jnp.repeat(jnp.arange(p, dtype=jnp.int32), chunks)


def gather(members: jax.Array, x: jax.Array) -> jax.Array:
    """[P, M Q, ...] from [B, Q, ...]."""
    taken = x[jnp.maximum(members, 0)]
    return taken.reshape(members.shape[0], -1, *x.shape[2:])


def gather_heads(members: jax.Array, x: jax.Array) -> jax.Array:
    """[P, G, M Q, ...] from [B, G, Q, ...]."""
    taken = jnp.moveaxis(x[jnp.maximum(members, 0)], 2, 1)  # [P, G, M, Q, ...]
    return taken.reshape(*taken.shape[:2], -1, *x.shape[3:])


def regroup(rows: Rows, members: jax.Array, length: jax.Array) -> Rows:
    """The queries of each group in one row; `length` i32[P] of the prefix that it reads."""
    queries = rows.queries.shape[2]
    there = jnp.repeat(members >= 0, queries, 1)
    first = None
    if rows.first is not None:
        nothing = jnp.iinfo(jnp.int32).max
        first = jnp.where(there, gather(members, rows.first) + length[:, None], nothing)
    return Rows(gather_heads(members, rows.queries), gather(members, rows.live) & there,
                gather(members, rows.words), first)


def scatter(members: jax.Array, partial: Partial, batch: int) -> Partial:
    """Each row's part [B, G, Q, ...] of [P, G, M Q, ...]; a row in no group has seen no key."""
    p, m = members.shape
    flat = members.reshape(-1)
    target = jnp.where(flat < 0, batch, flat)
    place = jnp.full(batch, -1, jnp.int32).at[target].set(
        jnp.arange(p * m, dtype=jnp.int32), mode="drop")

    def rows_of(x: jax.Array, nothing: float) -> jax.Array:
        x = x.reshape(p, x.shape[1], m, -1, x.shape[3])
        x = jnp.moveaxis(x, 2, 1).reshape(p * m, x.shape[1], x.shape[3], x.shape[4])
        return jnp.where((place >= 0)[:, None, None, None], x[jnp.maximum(place, 0)], nothing)

    return Partial(rows_of(partial.top, FLOOR), rows_of(partial.total, 0.0),
                   rows_of(partial.out, 0.0))
