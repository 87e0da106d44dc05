"""Tree attention on a CPU, by machine code made for the shapes.

Scores of the committed positions, then of the ancestors, lie in one line as if all were committed;
every sum over features or over positions is taken in one order. So a node's bits depend on its
query, its committed prefix and its ancestors alone: not on the tree, the batch or the layout of the
cache, and an ancestor counts the same before it is committed and after.
"""

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Unsupported
from specrl_kernels.machine_code import runtime
from specrl_kernels.tree_attention.operands import Operands

_MULTIPLE = 16  # of E and of segments, machine_code.emit.LANES
_FEW = 2  # heads that share what is read, at most, where `xla`, whose nodes share it, is faster
_NODES = 4  # packed nodes a row from which `xla` is faster
_SIZE = 64  # E from which this was measured


def tree_attention_machine(operands: Operands, *, scale: float, window: int | None) -> jax.Array:
    """See `api.tree_attention`."""
    q, row, node, tree_k, tree_v, parent, cache_k, cache_v, length, _, prefix, _ = operands
    b, n, g, e = tree_k.shape
    sizes = tuple(k.shape[3] for k in cache_k)
    if prefix is not None or window is not None:
        raise Unsupported("a shared prefix or a window")
    if {a.dtype for a in (q, tree_k, tree_v, *cache_k, *cache_v)} != {jnp.dtype(jnp.float32)}:
        raise Unsupported("float32 only")
    if e % _MULTIPLE or any(size % _MULTIPLE for size in sizes):
        raise Unsupported(f"E = {e}, segments = {sizes}: multiples of {_MULTIPLE} only")
    # Machine code does not check indices: a wrong one must not leave its array. Layers share these
    # few operations.
    row, node, parent, slot = (jnp.clip(index, 0, size - 1) for index, size in (
        (row, b), (node, n), (parent, n), (operands.context.slot, cache_k[0].shape[0])))
    length = jnp.clip(length, 0, sum(sizes))
    room = ((0, 0), (0, 0), (0, 0), (0, -n % _MULTIPLE))
    keys = jnp.pad(tree_k.transpose(0, 2, 3, 1), room)
    return runtime.call("tree_attention", (q.shape[1], g, e, n, *sizes),
                        jax.ShapeDtypeStruct(q.shape, jnp.float32), q * scale, row, node, keys,
                        tree_v.transpose(0, 2, 1, 3), parent, length, slot, *cache_k, *cache_v)


def leave_to_xla(operands: Operands) -> None:
    """Refuses shapes at which `xla` was measured to be faster: many nodes, few heads (LOG.md).

    Each node reads its row's keys and values for itself, which stays cheap as long as several heads
    share what is read.

    Raises:
      Unsupported: with the reason.
    """
    from specrl_kernels.tree_attention import code

    w, h, e = operands.q.shape
    b, n, g = operands.tree_k.shape[:3]
    together = code.Shape(h, g, e, n, ()).together
    if w >= _NODES * b and e >= _SIZE and together <= _FEW:
        raise Unsupported(f"xla is faster at {w // b} nodes a row with {h // g} heads of {e} to a "
                          "key: ask for it by name")
