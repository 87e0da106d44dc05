"""The work of tree attention, told to XLA and to whoever counts a program's FLOPs and bytes."""

import math
from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl

from specrl_kernels.tree_attention.packing import Rows


def estimate(rows: Rows, caches: Sequence[jax.Array], tree: tuple[jax.Array, jax.Array] | None,
             outputs: Sequence[jax.ShapeDtypeStruct]) -> pl.CostEstimate:
    """Returns what a call does if every allocated slot is filled, each key and value read once.

    Args:
      caches: all segments of keys and values, [slots, G, ...] or [slots, L, G, ...] each; a row
        reads one slot of one layer.
      tree: (k, v) [B, G, n, E] of the tree's own nodes.
      outputs: what the kernel writes.
    """
    b, g, queries, e = rows.queries.shape
    each = sum(math.prod(cache.shape[-3:]) for cache in caches)  # keys and values of a row
    nodes = tree[0].shape[2] if tree else 0
    keys = each // (2 * g * e) + nodes
    moved = b * each * caches[0].dtype.itemsize + sum(
        x.size * x.dtype.itemsize for x in (rows.queries, rows.words, *(tree or ()), *outputs))
    return pl.CostEstimate(flops=4 * b * g * queries * e * keys,
                           transcendentals=b * g * queries * keys, bytes_accessed=moved)


def joined(parts: Sequence[jax.ShapeDtypeStruct], outputs: Sequence[jax.ShapeDtypeStruct]
           ) -> pl.CostEstimate:
    """Returns what joining the partial results of all shares does: each is read and scaled once.

    Args:
      parts: (maximum, sum, weighted values) of the shares.
      outputs: what the kernel writes.
    """
    highest, _, values = parts
    return pl.CostEstimate(
        flops=2 * values.size, transcendentals=highest.size,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*parts, *outputs)))
