"""The signature of tree attention, and the choice of an implementation."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specrl_kernels import dispatch
from specrl_kernels.dispatch import Interpret, Unsupported, anywhere, kernel
from specrl_kernels.tree_attention import validate
from specrl_kernels.tree_attention.layers import all_rows, by_heads, one_layer
from specrl_kernels.tree_attention.machine import leave_to_xla, tree_attention_machine
from specrl_kernels.tree_attention.operands import Operands, Prefix
from specrl_kernels.tree_attention.reference import tree_attention_reference
from specrl_kernels.tree_attention.xla import tree_attention_xla

IMPLEMENTATIONS = {
    "pallas": by_heads(kernel("tree_attention", "pallas", "tpu")),
    "pallas_triton": by_heads(all_rows(kernel("tree_attention", "pallas_triton", "gpu"))),
    "triton": by_heads(all_rows(kernel("tree_attention", "triton", "gpu"))),
    "machine": one_layer(anywhere(tree_attention_machine, "cpu", unasked=leave_to_xla)),
    "xla": one_layer(tree_attention_xla, in_order=True),
    "reference": one_layer(anywhere(tree_attention_reference)),
}
"""In the order in which they are tried."""


def tree_attention(
    q: jax.Array,  # f[W, H, E]
    row: jax.Array | None,  # i32[W] row of each packed node; None: all nodes of all rows, in order
    node: jax.Array | None,  # i32[W] index of each packed node in its row; None as row is
    tree_k: jax.Array,  # f[B, n, G, E]
    tree_v: jax.Array,  # f[B, n, G, E]
    parent: jax.Array,  # i32[B, n] parent[i] < i; the root's is ignored
    cache_k: jax.Array | Sequence[jax.Array],  # f[slots, G, E, S], whole or in segments along S
    cache_v: jax.Array | Sequence[jax.Array],  # f[slots, G, S, E], likewise
    length: jax.Array,  # i32[B] committed tokens in the cache
    slot: jax.Array | None = None,  # i32[B] cache row of each row; None: row b uses cache row b
    prefix: Prefix | None = None,  # contexts before the rows' own, each shared by several rows
    layer: int | jax.Array | None = None,  # i32[] which of caches f[slots, L, ...]
    *,
    transposed_v: bool = False,  # cache_v is f[slots, G, E, S], as cache_k is
    plan: Any = None,  # of `plan`
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
    interpret: Interpret = False,
    platform: str | None = None,
    config: Mapping[str, int] | None = None,
    checked: bool = False,
) -> jax.Array:
    """One softmax over the committed prefix (masked by `length`), the node's ancestors and itself.

    Query head h reads key-value head h // (H / G). The node at depth d stands at position
    length + d; with `window` it sees only positions above length + d - window. Garbage at cache
    positions >= length must be finite and then changes nothing.

    Args:
      implementation: one of IMPLEMENTATIONS; None takes the first that can.
      interpret: Pallas kernels run by interpretation, on any device, slowly. A TPU's `pallas`
        also takes `pltpu.InterpretParams`, which simulate its memories.
      platform: "cpu", "gpu" or "tpu": if not that of the mesh in scope, see
        `dispatch.traced_for`.
      config: block sizes and splits of the named implementation; None takes its heuristic.
      checked: looks at values too, and so works outside of jit only.

    Returns:
      f[W, H, E], in q's dtype; the softmax is computed in float32.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation, or, if `checked`,
        values out of their range.
      Unsupported: a named implementation cannot do this.
      ExceptionGroup: none can; it holds each one's reason.
    """
    operands = _operands(q, row, node, tree_k, tree_v, parent, cache_k, cache_v, length, slot,
                         prefix, layer)
    validate.check_static(operands, window=window, transposed_v=transposed_v)
    if checked:
        validate.check_values(operands)
    target = dispatch.target(implementation, platform, interpret, config)
    function = dispatch.choose(IMPLEMENTATIONS, implementation)
    return function(operands, plan, scale=scale, window=window, target=target,
                    transposed_v=transposed_v)


def plan(q: Any, row: Any, node: Any, parent: Any, cache_k: Any, length: Any, slot: Any = None, *,
         window: int | None = None, implementation: str | None = None, interpret: bool = False,
         platform: str | None = None) -> Any:
    """Returns what calls that differ in `layer` alone share, as an argument of them; None is
    nothing.

    A loop over layers would compute it in each. Arguments are those of `tree_attention`, of which
    q may be a jax.ShapeDtypeStruct.
    """
    target = dispatch.target(implementation, platform, interpret)
    if implementation not in (None, "pallas"):
        return None
    names, devices = dispatch.automatic_axes()
    operands = _operands(q, row, node, None, None, parent, cache_k, None, length, slot)
    groups = operands.cache_k[0].shape[-3]
    parts = devices if names and groups % devices == 0 else 1
    try:
        make = kernel("tree_attention", "pallas", "tpu", function="plan")
        return make(operands, groups // parts, parts=parts, window=window, target=target)
    except Unsupported:
        return None


def refusals(*args: Any, window: int | None = None, platform: str | None = None,
             interpret: bool = False, **named: Any) -> dict[str, str | None]:
    """Why each implementation would not be taken for these arguments of `tree_attention`, in order.

    None stands for one that would be; arrays may be given by their jax.ShapeDtypeStruct.
    """
    operands = _operands(*args, **named)
    validate.check_static(operands, window=window, transposed_v=False)
    target = dispatch.target(None, platform, interpret)
    return dispatch.refusals(IMPLEMENTATIONS, operands, None, scale=1.0, window=window,
                             target=target, transposed_v=False)


def _operands(*args: Any, **named: Any) -> Operands:
    """Returns the arrays of a call, the caches as tuples of segments."""
    given = Operands(*args, **named)
    cache_k, cache_v = (tuple(x) if isinstance(x, Sequence) else (x,)
                        for x in (given.cache_k, given.cache_v))
    return given._replace(cache_k=cache_k, cache_v=cache_v)
