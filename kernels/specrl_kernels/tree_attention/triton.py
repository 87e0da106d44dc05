"""Tree attention for GPUs: Triton programs that jax-triton calls.

The same course as pallas_triton.py, but jax-triton passes a fixed list of arrays. So a cache of
several segments is one launch for each, the first of which sees the tree besides, and the joining
program puts together what all launches found. What jax-triton's versions name differently is in
triton_call.py. It cannot be lowered without JAX's CUDA plugin, nor traced by JAX 0.12 with 0.4.1.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Unsupported
from specrl_kernels.tree_attention import gpu, packing
from specrl_kernels.tree_attention.gpu import Config, Shares
from specrl_kernels.tree_attention.operands import Context
from specrl_kernels.tree_attention.packing import Rows
from specrl_kernels.tree_attention.softmax import Partial
from specrl_kernels.triton_call import Launch, program_call

PROGRAMS = "specrl_kernels.tree_attention.triton_kernel"


def tree_attention_triton(*args: Any, **options: Any) -> jax.Array:
    """See `api.tree_attention`."""
    if options["target"].interpret:
        raise Unsupported("a Triton program has no interpretation in JAX: it needs a GPU")
    return gpu.tree_attention(_attend, *args, **options)


def _attend(rows: Rows, tree: tuple[jax.Array, jax.Array] | None, context: Context, *,
            config: Config, scale: float, interpret: bool, whole: bool) -> Any:
    """Returns f[B, G, Q, E], or a Partial of it if not `whole`."""
    queries = rows.live.shape[1]
    rows = packing.pad_queries(rows, config.tile)
    shares, live = gpu.shares_of(rows, context.length, config)
    direct = whole and len(context.k) == 1
    by_row = config.splits == 1 and len(context.k) == 1
    launches = plan(rows, tree, context, shares, live, config, scale, direct, by_row)
    parts = [program_call(launch, config.warps, config.stages) for launch in launches]
    joined = parts[0]
    if not by_row:
        joined = program_call(
            joining(rows, shares, live, parts, config, whole, direct), config.warps, 1)
    out, top, total, sums = joined
    if whole:
        return out[:, :, :queries]
    return Partial(*(x[:, :, :queries] for x in (top[..., None], total[..., None], sums)))


def plan(rows: Rows, tree: tuple[jax.Array, jax.Array] | None, context: Context, shares: Shares,
         live: jax.Array, config: Config, scale: float, direct: bool, by_row: bool) -> list[Launch]:
    """The launch for each segment; `direct` and `by_row` as in `triton_kernel.attend`."""
    b, g, padded, e = rows.queries.shape
    first = jnp.zeros(rows.live.shape, jnp.int32) if rows.first is None else rows.first
    inputs = [rows.queries, rows.words, first, live, *shares, context.slot,
              *(tree or (rows.queries, rows.queries))]
    programs = shares.row.shape[0]
    outputs = _outputs(rows, b if direct else None, None if direct and by_row else programs)
    launches, start = [], 0
    for k, v in zip(context.k, context.v, strict=True):
        constants = dict(
            heads=g, queries=padded, E=e, nodes=1 if tree is None else tree[0].shape[2],
            word_count=rows.words.shape[2], size=k.shape[3], start=start,
            block=gpu.block_of(k.shape[3], config), tile=config.tile, scale=scale,
            has_tree=tree is not None and start == 0, has_window=rows.first is not None,
            by_row=by_row, direct=direct)
        launches.append(Launch(PROGRAMS, "attend", [*inputs, k, v], outputs,
                               (g * padded // config.tile, programs), constants))
        start += k.shape[3]
    return launches


def joining(rows: Rows, shares: Shares, live: jax.Array, parts: Sequence[Sequence[jax.Array]],
            config: Config, whole: bool, direct: bool) -> Launch:
    """The launch that joins what those of `plan` found."""
    b, g, padded, e = rows.queries.shape
    top, total, sums = (jnp.concatenate(x) if len(parts) > 1 else x[0]
                        for x in list(zip(*parts, strict=True))[1:])
    inputs = [shares.first, shares.count, live, top, total, sums, parts[0][0]]
    constants = dict(heads=g, queries=padded, E=e, tile=config.tile, shares=shares.row.shape[0],
                     launches=len(parts), whole=whole, least=2 if direct else 1,
                     few=gpu.JOIN_QUERIES, some=gpu.JOIN_SHARES)
    return Launch(PROGRAMS, "join", inputs, _outputs(rows, b if whole else None,
                                                     None if whole else b),
                  (g * padded // gpu.JOIN_QUERIES, b), constants, onto=direct)


def _outputs(rows: Rows, whole: int | None, parts: int | None) -> list[jax.ShapeDtypeStruct]:
    """Returns the outputs' shapes; `whole` finished rows and `parts` partial results, or None."""
    _, g, padded, e = rows.queries.shape
    out = (1,) if whole is None else (whole, g, padded, e)
    small = (1,) if parts is None else (parts, g, padded)
    sums = (1,) if parts is None else (parts, g, padded, e)
    return [jax.ShapeDtypeStruct(out, rows.queries.dtype),
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (small, small, sums))]
