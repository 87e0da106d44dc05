"""What lies between a call and an implementation: caches of all layers, and heads of many devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from specrl_kernels import dispatch
from specrl_kernels.tree_attention.shared_prefix import Prefix

Arrays = tuple[jax.Array, ...]
Layer = int | jax.Array | None


def one_layer(function: Callable[..., Any], in_order: bool = False) -> Callable[..., Any]:
    """Wraps an implementation that is given one layer's cache, with values [slots, G, S, E].

    `in_order`: it knows that no `row` means all nodes in order.
    """
    def call(q: Any, row: Any, node: Any, tree_k: Any, tree_v: Any, parent: Any, cache_k: Arrays,
             cache_v: Arrays, length: Any, slot: Any, prefix: Any, layer: Layer,
             plan: Any, *, transposed_v: bool, **options: Any) -> Any:
        if layer is not None:
            cache_k, cache_v = (tuple(jax.lax.dynamic_index_in_dim(x, layer, 1, False) for x in of)
                                for of in (cache_k, cache_v))
        if row is None and not in_order:
            row, node = (jnp.arange(parent.size, dtype=jnp.int32) // parent.shape[1],
                         jnp.arange(parent.size, dtype=jnp.int32) % parent.shape[1])
        return function(q, row, node, tree_k, tree_v, parent, cache_k,
                        _values_last(cache_v, transposed_v), length, slot, prefix, **options)

    return call


def all_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel that reads rows by `slot`: all layers' rows are one cache, of which no part is
    copied."""
    def call(q: Any, row: Any, node: Any, tree_k: Any, tree_v: Any, parent: Any, cache_k: Arrays,
             cache_v: Arrays, length: Any, slot: Any, prefix: Any, layer: Layer,
             plan: Any, *, transposed_v: bool, **options: Any) -> Any:
        cache_v = _values_last(cache_v, transposed_v)
        if layer is not None:
            rows, count = cache_k[0].shape[:2]
            slot = jnp.arange(rows, dtype=jnp.int32) if slot is None else slot
            slot = slot * jnp.int32(count) + layer
            cache_k, cache_v = (tuple(x.reshape(-1, *x.shape[2:]) for x in of)
                                for of in (cache_k, cache_v))
        return function(q, row, node, tree_k, tree_v, parent, cache_k, cache_v, length, slot,
                        prefix, **options)

    return call


def _values_last(cache_v: Arrays, transposed: bool) -> Arrays:
    return tuple(v.swapaxes(-1, -2) for v in cache_v) if transposed else cache_v


def by_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel so that each device runs it on its part of the heads.

    The compiler cannot split a kernel over the mesh axes that are left to it. Where they do not
    divide the heads, every device computes all of them.
    """
    def call(*args: Any, **options: Any) -> Any:
        names, size = dispatch.automatic_axes()
        if not names:
            return function(*args, **options)
        _, _, _, tree_k, _, _, cache_k, _, _, _, prefix, layer, plan = args
        split = names if tree_k.shape[2] % size == 0 else None

        def heads(axis: int) -> P:
            return P(*(None,) * axis, split)

        cache, full = heads(cache_k[0].ndim - 3), P()
        of_prefix: Any = (heads(1), heads(1), full, full)
        shared = None if prefix is None else Prefix(*of_prefix)
        specs = (heads(1), full, full, heads(2), heads(2), full, cache, cache, full, full,
                 shared, full, full)
        layer = None if layer is None else jnp.asarray(layer, jnp.int32)
        return jax.shard_map(
            lambda *parts: function(*parts, **options), in_specs=specs, out_specs=heads(1),
            axis_names=set(names), check_vma=False)(*args[:-2], layer, plan)

    return call
