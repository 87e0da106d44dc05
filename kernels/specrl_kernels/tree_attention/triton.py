"""Tree attention for GPUs: a Triton program that jax-triton calls.

The same course as pallas_triton.py, but jax-triton passes a fixed list of arrays. So a cache of
several segments is one launch for each, whose partial results are combined, and the first launch
sees the tree besides. jax-triton is imported here only, and what its versions name differently is
in `_call`. It cannot be traced without its CUDA plugin, and not at all under JAX 0.12 with 0.4.1.
"""

import importlib.metadata
import inspect
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Target, Unsupported
from specrl_kernels.tree_attention import gpu, packing, softmax
from specrl_kernels.tree_attention.gpu import Config
from specrl_kernels.tree_attention.packing import Rows
from specrl_kernels.tree_attention.softmax import Partial

NAME = "triton"


def tree_attention_triton(*args: Any, target: Target, **options: Any) -> jax.Array:
    """See `api.tree_attention`."""
    if target.interpret:
        raise Unsupported("a Triton program has no interpretation in JAX: it needs a GPU")
    return gpu.tree_attention(_attend, NAME, *args, target=target, **options)


def _attend(rows: Rows, tree: tuple[jax.Array, jax.Array] | None, cache_k: Sequence[jax.Array],
            cache_v: Sequence[jax.Array], length: jax.Array, slot: jax.Array, *, config: Config,
            scale: float, interpret: bool, whole: bool) -> Any:
    """f[B, G, Q, E], or a Partial of it if not `whole`."""
    queries = rows.live.shape[1]
    rows = packing.pad_queries(rows, config.tile)
    launches = plan(rows, tree, cache_k, cache_v, length, slot, config, scale,
                    whole and len(cache_k) == 1)
    found = [_call(*launch, config) for launch in launches]
    if whole and len(cache_k) == 1:
        return found[0][2][:, :, :queries]
    parts = [Partial(top[..., None], total[..., None], out) for top, total, out in found]
    partial = softmax.combine(Partial(*(
        jnp.concatenate(arrays)[:, :, :, :queries] for arrays in zip(*parts, strict=True))))
    return softmax.finish(partial).astype(rows.queries.dtype) if whole else partial


Launch = tuple[list[jax.Array], list[jax.ShapeDtypeStruct], tuple[int, ...], dict[str, Any]]


def plan(rows: Rows, tree: tuple[jax.Array, jax.Array] | None, cache_k: Sequence[jax.Array],
         cache_v: Sequence[jax.Array], length: jax.Array, slot: jax.Array, config: Config,
         scale: float, whole: bool) -> list[Launch]:
    """(arrays, outputs, grid, constants) of the launch for each segment."""
    b, g, padded, e = rows.queries.shape
    first = jnp.zeros(rows.live.shape, jnp.int32) if rows.first is None else rows.first
    inputs = [rows.queries, rows.words, first, packing.live_tiles(rows, config.tile), length,
              packing.oldest(rows), slot, *(tree or (rows.queries, rows.queries))]
    small = (1,) if whole else (config.splits, b, g, padded)
    outputs = [jax.ShapeDtypeStruct(small, jnp.float32)] * 2 + [
        jax.ShapeDtypeStruct((b, g, padded, e), rows.queries.dtype) if whole
        else jax.ShapeDtypeStruct((*small, e), jnp.float32)]
    launches, start = [], 0
    for k, v in zip(cache_k, cache_v, strict=True):
        constants = dict(
            rows=b, heads=g, queries=padded, E=e, nodes=1 if tree is None else tree[0].shape[2],
            word_count=rows.words.shape[2], size=k.shape[3], start=start,
            block=gpu.block_of(k.shape[3], config), whole_block=config.block, tile=config.tile,
            splits=config.splits, scale=scale, has_tree=tree is not None and start == 0,
            has_window=rows.first is not None, whole=whole)
        grid = (g * padded // config.tile, b, config.splits)
        launches.append(([*inputs, k, v], outputs, grid, constants))
        start += k.shape[3]
    return launches


def _call(inputs: list[jax.Array], outputs: list[jax.ShapeDtypeStruct], grid: tuple[int, ...],
          constants: dict[str, Any], config: Config) -> Sequence[jax.Array]:
    """jax-triton 0.3 names the outputs out_shape, 0.4 out_type."""
    try:
        import jax_triton

        from specrl_kernels.tree_attention.triton_kernel import attend
    except ImportError as reason:
        raise Unsupported(f"jax-triton is not there: {reason}") from reason
    check_versions(jax.__version__, importlib.metadata.version("jax-triton"))
    known = inspect.signature(jax_triton.triton_call).parameters
    kind = "out_type" if "out_type" in known else "out_shape"
    return jax_triton.triton_call(
        *inputs, kernel=attend, grid=grid, num_warps=config.warps, num_stages=config.stages,
        **{kind: outputs}, **constants)


def check_versions(ours: str, theirs: str) -> None:
    """Refuses a JAX and a jax-triton that fail together, long after this call. Raises Unsupported.
    """
    first, second = (tuple(int(n) for n in re.findall(r"\d+", x)[:3]) for x in (ours, theirs))
    if first >= (0, 12) and second <= (0, 4, 1):
        raise Unsupported(f"jax-triton {theirs} is not traced by JAX {ours}: use JAX 0.11 or "
                          "a newer jax-triton")
