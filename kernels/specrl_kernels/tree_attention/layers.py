"""Adapts implementations to caches of all layers, and to heads split over devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from specrl_kernels import dispatch
from specrl_kernels.tree_attention.operands import Operands, Prefix


def one_layer(function: Callable[..., Any], in_order: bool = False) -> Callable[..., Any]:
    """Wraps an implementation that takes one layer's cache, with values [slots, G, S, E].

    `in_order`: it takes no `row` for all nodes in order.
    """
    def call(operands: Operands, plan: Any, *, transposed_v: bool, **options: Any) -> Any:
        layer, parent = operands.layer, operands.parent
        if layer is not None:
            cache_k, cache_v = (tuple(jax.lax.dynamic_index_in_dim(x, layer, 1, False) for x in of)
                                for of in (operands.cache_k, operands.cache_v))
            operands = operands._replace(cache_k=cache_k, cache_v=cache_v)
        if operands.row is None and not in_order:
            index = jnp.arange(parent.size, dtype=jnp.int32)
            operands = operands._replace(row=index // parent.shape[1], node=index % parent.shape[1])
        return function(_values_last(operands, transposed_v), **options)

    return call


def all_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel that reads rows by `slot`: all layers' rows are one cache, of which no part is
    copied."""
    def call(operands: Operands, plan: Any, *, transposed_v: bool, **options: Any) -> Any:
        operands = _values_last(operands, transposed_v)
        if operands.layer is not None:
            count = operands.cache_k[0].shape[1]
            slot = operands.context.slot * jnp.int32(count) + operands.layer
            cache_k, cache_v = (tuple(x.reshape(-1, *x.shape[2:]) for x in of)
                                for of in (operands.cache_k, operands.cache_v))
            operands = operands._replace(cache_k=cache_k, cache_v=cache_v, slot=slot)
        return function(operands, **options)

    return call


def _values_last(operands: Operands, transposed: bool) -> Operands:
    if not transposed:
        return operands
    return operands._replace(cache_v=tuple(v.swapaxes(-1, -2) for v in operands.cache_v))


def by_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel so that each device runs it on its part of the heads.

    The compiler cannot split a kernel over the mesh axes that are left to it. Where they do not
    divide the heads, every device computes all of them.
    """
    def call(operands: Operands, plan: Any, **options: Any) -> Any:
        names, size = dispatch.automatic_axes()
        if not names:
            return function(operands, plan, **options)
        split = names if operands.tree_k.shape[2] % size == 0 else None

        def heads(axis: int) -> P:
            return P(*(None,) * axis, split)

        cache, full = heads(operands.cache_k[0].ndim - 3), P()
        of_prefix: Any = (heads(1), heads(1), full, full)
        specs: Any = dict.fromkeys(Operands._fields, full) | {
            "q": heads(1), "tree_k": heads(2), "tree_v": heads(2), "cache_k": cache,
            "cache_v": cache,
            "prefix": None if operands.prefix is None else Prefix(*of_prefix)}
        if operands.layer is not None:
            operands = operands._replace(layer=jnp.asarray(operands.layer, jnp.int32))
        return jax.shard_map(
            lambda *parts: function(*parts, **options), in_specs=(Operands(**specs), full),
            out_specs=heads(1), axis_names=set(names), check_vma=False)(operands, plan)

    return call
