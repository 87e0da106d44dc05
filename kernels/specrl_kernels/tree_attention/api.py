"""The signature of tree attention, its checks, and the choice of an implementation."""

from collections.abc import Sequence
from typing import Any

import jax

from specrl_kernels import dispatch
from specrl_kernels.tree_attention.machine import tree_attention_machine
from specrl_kernels.tree_attention.reference import tree_attention_reference
from specrl_kernels.tree_attention.xla import tree_attention_xla

_WHY = "shapes must agree with q [W, H, E], tree_k [B, n, G, E]"
IMPLEMENTATIONS = {"machine": tree_attention_machine, "xla": tree_attention_xla,
                   "reference": tree_attention_reference}


def tree_attention(
    q: jax.Array,  # f[W, H, E]
    row: jax.Array,  # i32[W] row of each packed node
    node: jax.Array,  # i32[W] node index of each packed node in its row
    tree_k: jax.Array,  # f[B, n, G, E]
    tree_v: jax.Array,  # f[B, n, G, E]
    parent: jax.Array,  # i32[B, n] parent[i] < i; the root's is ignored
    cache_k: jax.Array | Sequence[jax.Array],  # f[slots, G, E, S], whole or in segments along S
    cache_v: jax.Array | Sequence[jax.Array],  # f[slots, G, S, E], likewise
    length: jax.Array,  # i32[B] committed tokens in the cache
    slot: jax.Array | None = None,  # i32[B] cache row of each row; None: row b uses cache row b
    prefix: Any = None,
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """One softmax over the committed prefix (masked by `length`), the node's ancestors and itself.

    Query head h reads key-value head h // (H / G). The node at depth d stands at position
    length + d; with `window` it sees only positions above length + d - window. Garbage at cache
    positions >= length must be finite and then changes nothing.

    Returns:
      f[W, H, E], in q's dtype; the softmax is computed in float32.

    Raises:
      ValueError: shapes that do not fit, or an unknown implementation.
      Unsupported: a named implementation cannot do this.
      ExceptionGroup: none can; it holds each one's reason.
    """
    cache_k, cache_v = _segments(cache_k), _segments(cache_v)
    _check(q, row, node, tree_k, tree_v, parent, cache_k, cache_v, length, slot)
    function = dispatch.choose(IMPLEMENTATIONS, implementation)
    return function(q, row, node, tree_k, tree_v, parent, cache_k, cache_v, length, slot, prefix,
                    scale=scale, window=window)


def _segments(cache: jax.Array | Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(cache) if isinstance(cache, Sequence) else (cache,)


def _check(q: Any, row: Any, node: Any, tree_k: Any, tree_v: Any, parent: Any, cache_k: Any,
           cache_v: Any, length: Any, slot: Any) -> None:
    w, h, e = q.shape
    b, n, g, _ = tree_k.shape
    _expect("q's heads", h % g, 0, f"{h} is no multiple of {g} key-value heads")
    for name, array, shape in (
        ("row", row, (w,)), ("node", node, (w,)), ("tree_k", tree_k, (b, n, g, e)),
        ("tree_v", tree_v, (b, n, g, e)), ("parent", parent, (b, n)), ("length", length, (b,)),
    ):
        _expect(name, array.shape, shape, _WHY)
    slots = cache_k[0].shape[0]
    _expect("segments of cache_v", len(cache_v), len(cache_k), "as many as cache_k has")
    for k, v in zip(cache_k, cache_v, strict=True):
        s = k.shape[-1]
        _expect("cache_k", k.shape, (slots, g, e, s), _WHY)
        _expect("cache_v", v.shape, (slots, g, s, e), _WHY)
    if slot is not None:
        _expect("slot", slot.shape, (b,), "one cache row for each row")
    elif slots != b:
        raise ValueError(f"cache_k has {slots} rows for {b} rows: pass slot")


def _expect(name: str, found: Any, wanted: Any, why: str) -> None:
    if found != wanted:
        raise ValueError(f"{name} = {found}, expected {wanted}: {why}")
