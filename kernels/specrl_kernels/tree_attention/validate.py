"""Checks of tree attention's arguments: of shapes and dtypes always, of values on demand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specrl_kernels.tree_attention.operands import Operands, Prefix

_WHY = "shapes must agree with q [W, H, E], tree_k [B, n, G, E]"


def check_static(operands: Operands, *, window: int | None, transposed_v: bool) -> None:
    """Checks shapes and dtypes. Raises ValueError with the name of the argument."""
    q, row, tree_k, prefix = operands.q, operands.row, operands.tree_k, operands.prefix
    for name, array, axes in (("q", q, 3), ("tree_k", tree_k, 4)):
        _expect(f"axes of {name}", len(array.shape), axes, _WHY)
        if 0 in array.shape:
            raise ValueError(f"{name} = {array.shape}, expected no axis of 0")
    w, h, e = q.shape
    b, n, g, _ = tree_k.shape
    _expect("node is None", operands.node is None, row is None, "row and node go together")
    if row is None:
        _expect("q's nodes", w, b * n, "without row and node all are there, in order")
    _expect("q's heads", h % g, 0, f"{h} is no multiple of {g} key-value heads")
    shapes = {"row": (w,), "node": (w,), "tree_k": (b, n, g, e), "tree_v": (b, n, g, e),
              "parent": (b, n), "length": (b,)}
    for name, shape in shapes.items():
        array = getattr(operands, name)
        if array is not None:
            _expect(name, array.shape, shape, _WHY)
    _check_cache(operands, transposed_v)
    _check_prefix(prefix, g, e)
    _check_dtypes(operands)
    indices = {name: getattr(operands, name)
               for name in ("row", "node", "parent", "length", "slot")}
    if prefix is not None:
        indices |= {"prefix.length": prefix.length, "prefix.rows": prefix.rows}
    for name, array in indices.items():
        if array is not None and array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}, expected int32: cast it")
    if window is not None and window < 1:
        raise ValueError(f"window = {window}, expected at least 1: a node sees itself")


def _check_cache(operands: Operands, transposed_v: bool) -> None:
    cache_k, cache_v, slot = operands.cache_k, operands.cache_v, operands.slot
    b, _, g, e = operands.tree_k.shape
    if not cache_k:
        raise ValueError("cache_k = (), expected at least one segment")
    _expect("segments of cache_v", len(cache_v), len(cache_k), "as many as cache_k has")
    for k in cache_k:
        _expect("axes of cache_k", len(k.shape), 4 + (operands.layer is not None), _WHY)
    slots, *count, _, _, _ = cache_k[0].shape
    for k, v in zip(cache_k, cache_v, strict=True):
        s = k.shape[-1]
        _expect("cache_k", k.shape, (slots, *count, g, e, s), _WHY)
        if 0 in k.shape:
            raise ValueError(f"cache_k = {k.shape}, expected rows, and slots in each segment: drop "
                             "one that has none")
        of_a_head = (e, s) if transposed_v else (s, e)
        _expect("cache_v", v.shape, (slots, *count, g, *of_a_head), _WHY)
    if slot is not None:
        _expect("slot", slot.shape, (b,), "one cache row for each row")
    elif slots != b:
        raise ValueError(f"cache_k has {slots} rows for {b} rows: pass slot")


def _check_prefix(prefix: Prefix | None, g: int, e: int) -> None:
    if prefix is None:
        return
    _expect("axes of prefix.k", len(prefix.k.shape), 4, _WHY)
    count, size = prefix.k.shape[0], prefix.k.shape[3]
    _expect("prefix.k", prefix.k.shape, (count, g, e, size), _WHY)
    _expect("prefix.v", prefix.v.shape, (count, g, size, e), _WHY)
    _expect("prefix.length", prefix.length.shape, (count,), "one for each prefix")
    _expect("axes of prefix.rows", len(prefix.rows.shape), 2, "a line of rows for each prefix")
    _expect("lines of prefix.rows", prefix.rows.shape[0], count, "as many as there are prefixes")
    for name, array in (("prefix.k", prefix.k), ("prefix.rows", prefix.rows)):
        if 0 in array.shape:
            raise ValueError(f"{name} = {array.shape}, expected no axis of 0: else pass None")


def _check_dtypes(operands: Operands) -> None:
    q, prefix = operands.q, operands.prefix
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q is {q.dtype}, expected float32 or bfloat16")
    others = [("tree_k", operands.tree_k), ("tree_v", operands.tree_v),
              *(("cache_k", k) for k in operands.cache_k),
              *(("cache_v", v) for v in operands.cache_v)]
    if prefix is not None:
        others += [("prefix.k", prefix.k), ("prefix.v", prefix.v)]
    for name, array in others:
        if array.dtype != q.dtype:
            raise ValueError(f"{name} is {array.dtype}, expected q's {q.dtype}: cast one of them")


def _expect(name: str, value: Any, wanted: Any, why: str) -> None:
    if value != wanted:
        raise ValueError(f"{name} = {value}, expected {wanted}: {why}")


def check_values(operands: Operands) -> None:
    """Checks values, for tests and debugging: it waits for them.

    Raises:
      ValueError: the first value out of its range, or a call from inside of jit.
    """
    row, parent, prefix = operands.row, operands.parent, operands.prefix
    indices = (row, operands.node, parent, operands.length, operands.slot, prefix, operands.layer)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(indices)):
        raise ValueError("checked = True inside of jit: values are known outside of it only")
    b, n = parent.shape
    slots, *layers, _, _, _ = operands.cache_k[0].shape
    room = sum(k.shape[-1] for k in operands.cache_k)
    if row is not None:
        _between("row", row, 0, b - 1, "rows are counted from 0")
        _between("node", operands.node, 0, n - 1, "nodes are counted from 0")
    _between("length", operands.length, 0, room, f"the cache holds {room} tokens")
    _between("parent", np.asarray(parent)[:, 1:], 0, np.arange(n - 1)[None],
             "a node's parent comes before it", column=1)
    if operands.slot is not None:
        _between("slot", operands.slot, 0, slots - 1, "the cache has no such row")
    if operands.layer is not None:
        _between("layer", [operands.layer], 0, layers[0] - 1, "the cache has no such layer")
    if prefix is not None:
        size = prefix.k.shape[-1]
        _between("prefix.length", prefix.length, 0, size, f"a prefix holds {size} tokens")
        _between("prefix.rows", prefix.rows, -1, b - 1, "-1 fills")
        named, counts = np.unique(np.asarray(prefix.rows), return_counts=True)
        twice = named[(counts > 1) & (named >= 0)]
        if twice.size:
            raise ValueError(f"prefix.rows: row {twice[0]} stands twice, expected once at most")


def _between(name: str, values: Any, low: int, high: Any, why: str, column: int = 0) -> None:
    """Raises for the first of `values` outside [low, high]; its last index counts from `column`."""
    values = np.asarray(values)
    wrong = np.argwhere((values < low) | (values > high))
    if wrong.size:
        first = tuple(int(i) for i in wrong[0])
        shown = (*first[:-1], first[-1] + column)
        limit = int(np.broadcast_to(high, values.shape)[first])
        raise ValueError(f"{name}[{', '.join(map(str, shown))}] = {values[first]}, expected "
                         f"{low} to {limit}: {why}")
