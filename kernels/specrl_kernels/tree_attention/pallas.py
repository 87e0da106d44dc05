"""Tree attention for TPUs: a Pallas kernel that Mosaic compiles.

One grid step is one block of one row's context, all key-value heads of it; the blocks come from a
list (work_list.py), so that only what a live row sees is fetched, and Pallas fetches the next one
while this one is computed. All segments of the cache are arguments of one kernel, so there is one
softmax and no partial result in memory; the price is a buffer in VMEM for each of them. With
`splits`, each half of a chip with two cores takes an equal share of the list, and what they find
is combined afterwards.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specrl_kernels.dispatch import Target, Unsupported, configured, metadata
from specrl_kernels.tree_attention import packing, shared_prefix, softmax, work_list
from specrl_kernels.tree_attention.operands import Context, Operands, Prefix
from specrl_kernels.tree_attention.packing import Rows
from specrl_kernels.tree_attention.pallas_kernel import is_unrolled, kernel
from specrl_kernels.tree_attention.softmax import Partial

SUBLANES = 16  # rows of a register in bfloat16; in float32 it is 8
BUFFERS = 2  # of every block, one computed on and one filled
VMEM_BLOCKS = 24 << 20  # bytes that the blocks of context may take
SMALL = 512 << 10  # bytes of keys and values in 512 slots, below which blocks have 1,024
VMEM_LIMIT = 64 << 20  # bytes; v5e, v5p and v6e have 128 MiB (Google's TPU documents)
SMEM_LISTS = 512 << 10  # bytes of the 1 MiB of scalar memory that the work lists may take
VMEM_QUERIES = 24 << 20  # bytes that the queries of all rows of a shared prefix may take


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; none changes the result beyond rounding."""

    block: int = 512  # slots of context read in a step; a multiple of 128
    tile: int = 128  # queries computed on together, of which dead ones are skipped; of 16
    splits: int = 1  # shares of the context computed apart


def tree_attention_pallas(operands: Operands, plan: "Plan | None", *, scale: float,
                          window: int | None, transposed_v: bool, target: Target) -> jax.Array:
    """See `api.tree_attention`. Values of other than transposed caches are copied."""
    b, n, g, _ = operands.tree_k.shape
    prefix, context = operands.prefix, operands.context
    rows = packing.unpack(operands, g, window)
    config = _config(target, rows, context.k)
    tree = (packing.by_head(operands.tree_k), packing.by_head(operands.tree_v))
    if not transposed_v:
        context = _transposed(context)
    run = functools.partial(_attend, config=config, scale=scale, interpret=target.interpret)
    own = functools.partial(run, rows, tree, context, layer=operands.layer, plan=plan)
    if prefix is None and config.splits == 1:
        out = own(whole=True)
    else:
        parts = [own(whole=False)]
        if prefix is not None:
            parts.append(_prefix_part(run, rows, prefix, b))
        out = softmax.finish(softmax.combine(softmax.stack(parts))).astype(operands.q.dtype)
    return packing.pack(out, operands.row, operands.node, n)


def _transposed(context: Context) -> Context:
    return context._replace(v=tuple(v.swapaxes(-1, -2) for v in context.v))


def _prefix_part(run: Any, rows: Rows, prefix: Prefix, batch: int) -> Partial:
    members, which = shared_prefix.split_members(prefix, _rows_together(rows))
    length = prefix.length[which]
    context = _transposed(Context((prefix.k,), (prefix.v,), length, which))
    part = run(shared_prefix.regroup(rows, members, length), None, context, whole=False)
    return shared_prefix.scatter(members, part, batch)


def _rows_together(rows: Rows) -> int:
    """Returns the rows of a group whose queries fit into VMEM; the prefix is read once for them.

    A query has, for each head, E numbers in its own dtype, and twice E + 2 lines of float32: the
    carry, and the outputs. A number alone takes a line of 128. Pallas holds inputs and outputs
    twice.
    """
    _, g, queries, e = rows.queries.shape
    line = max(e, 128)
    each = g * (BUFFERS * line * rows.queries.dtype.itemsize + 4 * (BUFFERS + 1) * (line + 256))
    return max(1, VMEM_QUERIES // (each * queries))


def _config(target: Target, rows: Rows, cache_k: Sequence[jax.Array]) -> Config:
    """Returns the given configuration, else the one of the largest blocks that fit.

    Raises:
      Unsupported: nothing fits, or the given one does not.
    """
    b, g, _, e = rows.queries.shape
    sizes, item = [k.shape[-1] for k in cache_k], cache_k[0].dtype.itemsize
    config = heuristic(target.kind, sizes, g * e * item) if target.config is None else configured(
        Config, target.config)
    if (min(config.block, config.tile, config.splits) < 1 or config.block % 128
            or config.tile % SUBLANES):
        raise Unsupported(f"{config}: block is a multiple of 128, tile of 16, splits at least 1")
    if max(b, cache_k[0].shape[0]) > work_list.ROWS:
        raise Unsupported(f"{b} rows and a cache of {cache_k[0].shape[0]}: at most "
                          f"{work_list.ROWS} of each")
    if _buffers(sizes, config.block, g * e * item) > VMEM_BLOCKS:
        raise Unsupported(f"{len(sizes)} segments with {g} heads of {e} in blocks of {config.block}"
                          f" do not fit into VMEM: pass fewer segments")
    lists = 4 * (1 + len(sizes)) * work_list.most_steps(b, sizes, config.block)
    if lists > SMEM_LISTS:
        raise Unsupported(f"the list of {b} rows by {sum(sizes)} slots takes {lists} bytes of "
                          f"{SMEM_LISTS}: pass fewer segments, or larger blocks")
    return config


def heuristic(kind: str, sizes: Sequence[int], slot_bytes: int) -> Config:
    """Returns the largest blocks that fit; two shares if a chip's two cores act as one device.

    By its machine code for v5e and v6e a step of 8 nodes of 7 heads takes longer than the bytes of
    512 slots if those are few, and hardly longer than those of 1,024. Larger blocks would read more
    slots beyond a row's end than they save.
    """
    block = 1024 if 2 * slot_bytes * 512 < SMALL else 512
    while block > 128 and _buffers(sizes, block, slot_bytes) > VMEM_BLOCKS:
        block //= 2
    return Config(block=block, splits=2 if kind in ("TPU v4", "TPU v5", "TPU v5p") else 1)


def _buffers(sizes: Sequence[int], block: int, slot_bytes: int) -> int:
    """Returns the bytes of VMEM for blocks of keys and values."""
    return 2 * BUFFERS * slot_bytes * sum(min(block, size) for size in sizes)


def _attend(rows: Rows, tree: tuple[jax.Array, jax.Array] | None, context: Context, *,
            config: Config, scale: float, interpret: bool, whole: bool,
            layer: int | jax.Array | None = None, plan: "Plan | None" = None) -> Any:
    """Returns f[B, G, Q, E], or a Partial of it if not `whole`; values are [slots, G, E, S]."""
    batch, queries = rows.live.shape
    sizes = [k.shape[-1] for k in context.k]
    tile = _tile(config, queries)
    rows = packing.pad_queries(rows, tile)
    live, info, work = plan or _plan(rows, context, config)
    share = jnp.maximum(-(-work.count // config.splits), 1)
    at_layer = jnp.asarray(0 if layer is None else layer, jnp.int32)[None]
    scalars = (work.count[None], share[None], at_layer, work.steps, context.length,
               live, *work.fetch)
    inputs = [rows.queries, info, *(tree or ())]
    specs = [_per_row(x) for x in inputs]
    for i, (k, v) in enumerate(zip(context.k, context.v, strict=True)):
        inputs += [k, v] if layer is not None else [k[:, None], v[:, None]]
        specs += _context_specs(k, i, config)
    outputs = _outputs(rows, config.splits, whole)
    body = functools.partial(kernel, sizes=tuple(sizes), block=config.block, splits=config.splits,
                             tile=tile, scale=scale, has_tree=tree is not None,
                             has_window=rows.first is not None)
    g, padded, e = rows.queries.shape[1:]
    out = pl.pallas_call(
        body, out_shape=outputs, interpret=interpret, name="tree_attention",
        metadata=metadata(
            -(-work_list.most_steps(batch, sizes, config.block) // config.splits),
            1 if is_unrolled(sizes, g, padded // tile) else g * (padded // tile)),
        cost_estimate=_cost(rows, context, inputs, outputs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(config.splits, share), in_specs=specs,
            out_specs=[_per_row(x, output=True) for x in outputs],
            scratch_shapes=[pltpu.VMEM((g, padded, width), jnp.float32) for width in (1, 1, e)]),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT),
    )(*scalars, *inputs)
    if whole:
        return out[0][0, :, :, :queries]
    return _combined(Partial(*out), work, share, batch, queries)


class Plan(NamedTuple):
    """What does not depend on queries, keys and values."""

    live: jax.Array  # i32[B * tiles] see packing.live_tiles
    info: jax.Array  # i32[B, Q, C + 1]
    work: work_list.WorkList


def plan(operands: Operands, groups: int, *, parts: int, window: int | None, target: Target
         ) -> Plan:
    """See `api.plan`; `parts` devices have `groups` key-value heads each."""
    w, h, e = operands.q.shape
    queries = jnp.zeros((w, h // parts, e), operands.q.dtype)
    rows = packing.unpack(operands._replace(q=queries), groups, window)
    config = _config(target, rows, operands.cache_k)
    rows = packing.pad_queries(rows, _tile(config, rows.live.shape[1]))
    return _plan(rows, operands.context, config)


def _plan(rows: Rows, context: Context, config: Config) -> Plan:
    live = packing.live_tiles(rows, _tile(config, rows.live.shape[1]))  # [B, tiles]
    sizes = [k.shape[-1] for k in context.k]
    work = work_list.make(context.length, packing.oldest(rows), live.any(1), context.slot, sizes,
                          config.block)
    return Plan(live.reshape(-1), _info(rows), work)


def _tile(config: Config, queries: int) -> int:
    """Returns the queries of a tile: all of them, of any number, if they fit into one."""
    return min(config.tile, queries)


def _info(rows: Rows) -> jax.Array:
    """i32[B, Q, C + 1]: the words of the tree, and the oldest place that is seen."""
    first = jnp.zeros(rows.live.shape, jnp.int32) if rows.first is None else rows.first
    return jnp.concatenate([rows.words, first[..., None]], 2)


def _outputs(rows: Rows, splits: int, whole: bool) -> list[jax.ShapeDtypeStruct]:
    b, g, q, e = rows.queries.shape
    if whole:
        return [jax.ShapeDtypeStruct((1, b, g, q, e), rows.queries.dtype)]
    return [jax.ShapeDtypeStruct((splits, b, g, q, width), jnp.float32) for width in (1, 1, e)]


def _cost(rows: Rows, context: Context, inputs: Sequence[jax.Array],
          outputs: Sequence[jax.ShapeDtypeStruct]) -> pl.CostEstimate:
    """Returns the work, for XLA's scheduler, if all slots are filled: each is read once a row."""
    b, g, queries, e = rows.queries.shape
    each = 2 * sum(math.prod(k.shape[-3:]) for k in context.k)  # keys and values of a row
    own = [x for x in inputs if x.ndim < 5]  # all but the caches, which may be larger
    nodes = own[2].shape[2] if len(own) > 2 else 0
    keys = each // (2 * g * e) + nodes
    moved = b * each * context.k[0].dtype.itemsize + sum(
        x.size * x.dtype.itemsize for x in (*own, *outputs))
    return pl.CostEstimate(flops=4 * b * g * queries * e * keys,
                           transcendentals=b * g * queries * keys, bytes_accessed=moved)


def _combined(parts: Partial, work: work_list.WorkList, share: jax.Array, batch: int, queries: int
              ) -> Partial:
    """One Partial; a share that holds no step of a row has written nothing for it."""
    splits = parts.top.shape[0]
    step = jnp.arange(work.steps.shape[0])
    owner = jnp.where(step < work.count, step // share, splits)
    wrote = jnp.zeros((splits, batch), bool).at[owner, work.steps >> work_list.SHIFT].set(
        True, mode="drop")[..., None, None, None]
    return softmax.combine(Partial(
        *(jnp.where(wrote, x, nothing)[:, :, :, :queries]
          for x, nothing in zip(parts, (softmax.FLOOR, 0.0, 0.0), strict=True))))


def _step(split: Any, step: Any, scalars: Any) -> Any:
    """Returns the grid step's place in the list; steps beyond a share's end repeat its last."""
    count, share = scalars[0][0], scalars[1][0]
    return jnp.clip(jnp.minimum(split * share + step, count - 1), 0)


def _per_row(x: Any, output: bool = False) -> pl.BlockSpec:
    """A whole row of [B, ...], or of the output [splits, B, ...]."""
    def index(split: Any, step: Any, *scalars: Any) -> tuple[Any, ...]:
        row = scalars[3][_step(split, step, scalars)] >> work_list.SHIFT
        return (split, row, 0, 0, 0) if output else (row, *[0] * (len(x.shape) - 1))

    return pl.BlockSpec((1, 1, *x.shape[2:]) if output else (1, *x.shape[1:]), index)


def _context_specs(k: jax.Array, segment: int, config: Config) -> list[pl.BlockSpec]:
    """A block of keys and one of values, [1, 1, G, E, T] of [slots, L, G, E, S] each."""
    g, e, size = k.shape[-3:]
    block = min(config.block, size)

    def index(split: Any, step: Any, *scalars: Any) -> tuple[Any, ...]:
        at = scalars[6 + segment][_step(split, step, scalars)]
        return at >> work_list.SHIFT, scalars[2][0], 0, 0, at & work_list.LOW

    return [pl.BlockSpec((1, 1, g, e, block), index)] * 2
