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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specrl_kernels.dispatch import Target, Unsupported, configured
from specrl_kernels.tree_attention import cost, packing, shared_prefix, softmax, work_list
from specrl_kernels.tree_attention.layers import Layer
from specrl_kernels.tree_attention.packing import Rows
from specrl_kernels.tree_attention.pallas_kernel import kernel
from specrl_kernels.tree_attention.shared_prefix import Prefix
from specrl_kernels.tree_attention.softmax import Partial

NAME = "pallas"
SUBLANES = 16  # rows of a register in bfloat16; in float32 it is 8
BUFFERS = 2  # of every block, one computed on and one filled
VMEM_BLOCKS = 24 << 20  # bytes that the blocks of context may take
VMEM_LIMIT = 64 << 20  # bytes; v5e, v5p and v6e have 128 MiB (Google's TPU documents)
SMEM_LISTS = 512 << 10  # bytes of the 1 MiB of scalar memory that the work lists may take
VMEM_QUERIES = 24 << 20  # bytes that the queries of all rows of a shared prefix may take


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters; none changes the result beyond rounding."""

    block: int = 512  # slots of context read in a step; a multiple of 128
    tile: int = 128  # queries computed on together, of which dead ones are skipped; of 16
    splits: int = 1  # shares of the context computed apart


def tree_attention_pallas(q: jax.Array, row: jax.Array, node: jax.Array, tree_k: jax.Array,
                          tree_v: jax.Array, parent: jax.Array, cache_k: tuple[jax.Array, ...],
                          cache_v: tuple[jax.Array, ...], length: jax.Array,
                          slot: jax.Array | None, prefix: Prefix | None, layer: Layer,
                          plan: "Plan | None", *, scale: float, window: int | None,
                          transposed_v: bool, target: Target) -> jax.Array:
    """See `api.tree_attention`. Values of other than transposed caches are copied."""
    b, n, g, _ = tree_k.shape
    rows = packing.unpack(q, row, node, parent, g, length, window)
    config = _config(target, rows, cache_k)
    slot = jnp.arange(b, dtype=jnp.int32) if slot is None else slot
    nodes = -(-n // SUBLANES) * SUBLANES
    tree = (packing.by_head(tree_k, nodes), packing.by_head(tree_v, nodes))
    run = functools.partial(_attend, config=config, scale=scale, interpret=target.interpret)
    own = functools.partial(run, rows, tree, cache_k, cache_v, length, slot, layer=layer,
                            transposed_v=transposed_v, plan=plan)
    if prefix is None and config.splits == 1:
        out = own(whole=True)
    else:
        parts = [own(whole=False)]
        if prefix is not None:
            parts.append(_prefix_part(run, rows, prefix, b))
        out = softmax.finish(softmax.combine(softmax.stack(parts))).astype(q.dtype)
    return packing.pack(out, row, node, n)


def _prefix_part(run: Any, rows: Rows, prefix: Prefix, batch: int) -> Partial:
    members, which = shared_prefix.split_members(prefix, _rows_together(rows))
    length = prefix.length[which]
    part = run(shared_prefix.regroup(rows, members, length), None, (prefix.k,), (prefix.v,), length,
               which, whole=False)
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
    """Returns the given configuration, or the tuned one, or the largest that fits.

    Raises:
      Unsupported: nothing fits, or the given one does not.
    """
    b, g, _, e = rows.queries.shape
    sizes, item = [k.shape[-1] for k in cache_k], cache_k[0].dtype.itemsize
    found = packing.tuned(target, NAME, rows, sum(sizes))
    config = configured(Config, found) if found is not None else heuristic(
        target.kind, sizes, g * e * item)
    if (min(config.block, config.tile, config.splits) < 1 or config.block % 128
            or config.tile % SUBLANES):
        raise Unsupported(f"{config}: block is a multiple of 128, tile of 16, splits at least 1")
    if max(b, cache_k[0].shape[0]) > work_list.ROWS:
        raise Unsupported(f"{b} rows and a cache of {cache_k[0].shape[0]}: at most "
                          f"{work_list.ROWS} of each")
    if _buffers(sizes, config.block, g * e * item) > VMEM_BLOCKS:
        raise Unsupported(f"{len(sizes)} segments with {g} heads of {e} in blocks of {config.block}"
                          f" do not fit into VMEM: pass fewer segments")
    lists = 4 * (1 + len(sizes)) * work_list.places(b, sizes, config.block)
    if lists > SMEM_LISTS:
        raise Unsupported(f"the list of {b} rows by {sum(sizes)} slots takes {lists} bytes of "
                          f"{SMEM_LISTS}: pass fewer segments, or larger blocks")
    return config


def heuristic(kind: str, sizes: Sequence[int], slot_bytes: int) -> Config:
    """Returns the largest blocks that fit; two shares if a chip's two cores act as one device."""
    block = 512
    while block > 128 and _buffers(sizes, block, slot_bytes) > VMEM_BLOCKS:
        block //= 2
    return Config(block=block, splits=2 if kind in ("TPU v4", "TPU v5", "TPU v5p") else 1)


def _buffers(sizes: Sequence[int], block: int, slot_bytes: int) -> int:
    """Returns the bytes of VMEM for blocks of keys and values."""
    return 2 * BUFFERS * slot_bytes * sum(min(block, size) for size in sizes)


def _attend(rows: Rows, tree: tuple[jax.Array, jax.Array] | None, cache_k: Sequence[jax.Array],
            cache_v: Sequence[jax.Array], length: jax.Array, slot: jax.Array, *, config: Config,
            scale: float, interpret: bool, whole: bool, layer: Layer = None,
            transposed_v: bool = False, plan: "Plan | None" = None) -> Any:
    """f[B, G, Q, E], or a Partial of it if not `whole`."""
    batch, queries = rows.live.shape
    sizes = [k.shape[-1] for k in cache_k]
    tile = _tile(config, queries)
    rows = packing.pad_queries(rows, tile)
    live, info, work = plan or _plan(rows, length, slot, sizes, config)
    share = jnp.maximum(-(-work.count // config.splits), 1)
    bounds = jnp.stack([work.count, share, jnp.asarray(0 if layer is None else layer, jnp.int32)])
    scalars = (bounds, work.steps, length, live.reshape(-1), *work.fetch)
    inputs = [rows.queries, info, *(tree or ())]
    specs = [_per_row(x) for x in inputs]
    for i, (k, v) in enumerate(zip(cache_k, cache_v, strict=True)):
        v = v if transposed_v else v.swapaxes(-1, -2)
        inputs += [k, v] if layer is not None else [k[:, None], v[:, None]]
        specs += _context_specs(k, i, config)
    outputs = _outputs(rows, config.splits, whole)
    body = functools.partial(kernel, sizes=tuple(sizes), block=config.block, splits=config.splits,
                             tile=tile, scale=scale, has_tree=tree is not None,
                             has_window=rows.first is not None)
    g, padded, e = rows.queries.shape[1:]
    out = pl.pallas_call(
        body, out_shape=outputs, interpret=interpret, name="tree_attention",
        cost_estimate=cost.estimate(rows, [*cache_k, *cache_v], tree, outputs),
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

    live: jax.Array  # i32[B, tiles] see packing.live_tiles
    info: jax.Array  # i32[B, Q, C + 1]
    work: work_list.WorkList


def plan(q: Any, row: Any, node: Any, parent: jax.Array, cache_k: Sequence[jax.Array],
         length: jax.Array, slot: jax.Array | None, groups: int, *, parts: int,
         window: int | None, target: Target) -> Plan:
    """See `api.plan`; `parts` devices have `groups` key-value heads each."""
    queries = jnp.zeros((q.shape[0], q.shape[1] // parts, q.shape[2]), q.dtype)
    rows = packing.unpack(queries, row, node, parent, groups, length, window)
    config = _config(target, rows, cache_k)
    slot = jnp.arange(parent.shape[0], dtype=jnp.int32) if slot is None else slot
    rows = packing.pad_queries(rows, _tile(config, rows.live.shape[1]))
    return _plan(rows, length, slot, [k.shape[-1] for k in cache_k], config)


def _plan(rows: Rows, length: jax.Array, slot: jax.Array, sizes: Sequence[int], config: Config
          ) -> Plan:
    live = packing.live_tiles(rows, _tile(config, rows.live.shape[1]))
    work = work_list.make(length, packing.oldest(rows), live.any(1), slot, sizes, config.block)
    return Plan(live, _info(rows), work)


def _tile(config: Config, queries: int) -> int:
    return min(config.tile, -(-queries // SUBLANES) * SUBLANES)


def _info(rows: Rows) -> jax.Array:
    """i32[B, Q, C + 1]: the words of the tree, and the oldest place that is seen."""
    first = jnp.zeros(rows.live.shape, jnp.int32) if rows.first is None else rows.first
    return jnp.concatenate([rows.words, first[..., None]], 2)


def _outputs(rows: Rows, splits: int, whole: bool) -> list[jax.ShapeDtypeStruct]:
    b, g, q, e = rows.queries.shape
    if whole:
        return [jax.ShapeDtypeStruct((1, b, g, q, e), rows.queries.dtype)]
    return [jax.ShapeDtypeStruct((splits, b, g, q, width), jnp.float32) for width in (1, 1, e)]


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
    count, share = scalars[0][0], scalars[0][1]
    return jnp.clip(jnp.minimum(split * share + step, count - 1), 0)


def _per_row(x: Any, output: bool = False) -> pl.BlockSpec:
    """A whole row of [B, ...], or of the output [splits, B, ...]."""
    def index(split: Any, step: Any, *scalars: Any) -> tuple[Any, ...]:
        row = scalars[1][_step(split, step, scalars)] >> work_list.SHIFT
        return (split, row, 0, 0, 0) if output else (row, *[0] * (len(x.shape) - 1))

    return pl.BlockSpec((1, 1, *x.shape[2:]) if output else (1, *x.shape[1:]), index)


def _context_specs(k: jax.Array, segment: int, config: Config) -> list[pl.BlockSpec]:
    """A block of keys and one of values, [1, 1, G, E, T] of [slots, L, G, E, S] each."""
    g, e, size = k.shape[-3:]
    block = min(config.block, size)

    def index(split: Any, step: Any, *scalars: Any) -> tuple[Any, ...]:
        at = scalars[4 + segment][_step(split, step, scalars)]
        return at >> work_list.SHIFT, scalars[0][2], 0, 0, at & work_list.LOW

    return [pl.BlockSpec((1, 1, g, e, block), index)] * 2
