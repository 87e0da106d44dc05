"""The appends for TPUs: Pallas kernels that rewrite only the tiles that change.

A tile is the least that a TPU can write. A grid step reads one of a row, puts the new entries in,
and writes it back to where it was: arrays are aliased, so nothing else is read or copied. Slots of
a cache lie in lanes, 128 to a tile; there a token's lane is rolled to its slot.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specrl_kernels.dispatch import Target, Unsupported, configured, metadata

LANES = 128
BUFFERS = 2  # of every block, one computed on and one moved
VMEM_BLOCKS = 24 << 20  # bytes that all blocks may take
VMEM_LIMIT = 64 << 20
UNROLL = 16  # tokens; more than a round commits run in a loop


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; none changes the result."""

    layers: int  # in a grid step; divides L


def cache_append_pallas(caches: tuple[jax.Array, ...], new: jax.Array, start: jax.Array,
                        count: jax.Array, *, target: Target) -> tuple[jax.Array, ...]:
    """See `api.cache_append`. Slots beyond those that are written keep their bits."""
    rows, layers, g, e, slots = caches[0].shape
    n, item = new.shape[0], caches[0].dtype.itemsize
    if slots % LANES or e % (32 // item):
        raise Unsupported(f"{slots} slots of {e} numbers: slots must be a multiple of {LANES}, "
                          f"numbers of {32 // item}")
    config = heuristic(layers, len(caches) * g * e * LANES * item, n) if target.config is None \
        else configured(Config, target.config)
    if layers % config.layers:
        raise Unsupported(f"{config}: layers must divide {layers}")
    new = jnp.pad(new, [(0, 0)] * 5 + [(0, -rows % LANES)])
    of_tile = functools.partial(_tile, LANES, slots)
    tiles = _tiles(n, LANES)

    def of_cache(layer: jax.Array, row: jax.Array, tile: jax.Array, start: jax.Array,
                 count: jax.Array) -> tuple[jax.Array | int, ...]:
        return row, layer, 0, 0, of_tile(start[row], count[row], tile)

    cache = pl.BlockSpec((1, config.layers, g, e, LANES), of_cache)
    tokens = pl.BlockSpec((n, config.layers, len(caches), g, e, LANES),
                          lambda layer, row, tile, *_: (0, layer, 0, 0, 0, row // LANES))
    moved = rows * tiles * layers * len(caches) * g * e * LANES * item
    out = pl.pallas_call(
        functools.partial(_kernel, count=len(caches)),
        out_shape=[pltpu.HBM(c.shape, c.dtype) for c in caches], name="cache_append",
        interpret=target.interpret, input_output_aliases={3 + i: i for i in range(len(caches))},
        metadata=metadata(rows * tiles * layers // config.layers, config.layers),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * moved),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(layers // config.layers, rows, tiles),
            in_specs=[tokens, *[cache] * len(caches)], out_specs=[cache] * len(caches)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=VMEM_LIMIT),
    )(start, count, new, *(_in_hbm(cache, target) for cache in caches))
    return tuple(out)


def heuristic(layers: int, layer_bytes: int, n: int) -> Config:
    """Returns as many layers as fit: a tile of each cache in and out, and n of new tokens."""
    fits = [x for x in range(1, layers + 1)
            if layers % x == 0 and x * layer_bytes * BUFFERS * (2 + n) <= VMEM_BLOCKS]
    return Config(layers=max(fits, default=1))


def row_append_pallas(array: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array, *,
                      target: Target) -> jax.Array:
    """See `api.row_append`. Entries beyond those that are written keep their bits."""
    (rows, size, features), n = array.shape, new.shape[1]
    tile = 32 // array.dtype.itemsize
    if size % tile or features % LANES:
        raise Unsupported(f"{size} entries of {features} numbers: entries must be a multiple of "
                          f"{tile}, numbers of {LANES}")
    block = pl.BlockSpec((1, tile, features), lambda row, at, start, count: (
        row, _tile(tile, size, start[row], count[row], at), 0))
    moved = rows * _tiles(n, tile) * tile * features * array.dtype.itemsize
    return pl.pallas_call(
        _row_kernel, out_shape=pltpu.HBM(array.shape, array.dtype), name="row_append",
        interpret=target.interpret, input_output_aliases={3: 0},
        metadata=metadata(rows * _tiles(n, tile)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * moved),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(rows, _tiles(n, tile)),
            in_specs=[pl.BlockSpec((1, n, features), lambda row, *_: (row, 0, 0)), block],
            out_specs=block),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 2),
    )(start, count, new, _in_hbm(array, target))


def _in_hbm(x: jax.Array, target: Target) -> jax.Array:
    """Returns x, which the compiler leaves in HBM; it would move a small one to VMEM and back."""
    return x if target.interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def _tiles(n: int, tile: int) -> int:
    """Returns how many tiles n entries may touch."""
    return 1 if n == 1 else 2 + (n - 2) // tile


def _tile(tile: int, size: int, start: jax.Array, count: jax.Array, i: jax.Array) -> jax.Array:
    """Returns the index of the i-th tile of a row's new entries, or of the last one again: a tile
    that stays is neither read nor written twice."""
    end = (start + jnp.maximum(count, 1) - 1) // tile
    return jnp.minimum(jnp.minimum(start // tile + i, end), size // tile - 1)


def _if_new(tile: int, start: jax.Array, count: jax.Array, i: jax.Array,
            write: Callable[[jax.Array], None]) -> None:
    """Calls write(start relative to the tile) unless the step has its predecessor's tile."""
    index = start // tile + i
    pl.when(index <= (start + jnp.maximum(count, 1) - 1) // tile)(
        lambda: write(start - index * tile))


def _kernel(start: Any, length: Any, new: Any, *caches: Any, count: int) -> None:
    row = pl.program_id(1)
    old, out = caches[:count], caches[count:]
    n, layers, _, g, e, lanes = new.shape
    lines = g * e // _packed(new)
    lane = jax.lax.broadcasted_iota(jnp.int32, (lines, lanes), 1)

    def write(first: jax.Array) -> None:
        def put(c: int, i: jax.Array, d: jax.Array, values: jax.Array) -> jax.Array:
            rolled = pltpu.roll(_words(new[d, i, c].reshape(g * e, lanes)),
                                jnp.remainder(first + d - row, LANES), 1)
            return jnp.where((lane == first + d) & (d < length[row]), rolled, values)

        def layer(i: jax.Array, _: None) -> None:
            for c in range(count):
                values = jax.lax.fori_loop(
                    0, n, functools.partial(put, c, i), _words(old[c][0, i].reshape(g * e, lanes)),
                    unroll=min(n, UNROLL))
                out[c][0, i] = _numbers(values, new.dtype).reshape(g, e, lanes)

        jax.lax.fori_loop(0, layers, layer, None)

    _if_new(LANES, start[row], length[row], pl.program_id(2), write)


def _row_kernel(start: Any, length: Any, new: Any, old: Any, out: Any) -> None:
    row, (_, tile, features) = pl.program_id(0), old.shape
    line = jax.lax.broadcasted_iota(jnp.int32, (tile, features), 0)

    def write(first: jax.Array) -> None:
        values = old[0].astype(jnp.float32)
        for d in range(new.shape[1]):
            values = jnp.where((line == first + d) & (d < length[row]),
                               new[0, d][None].astype(jnp.float32), values)
        out[0] = values.astype(out.dtype)

    _if_new(tile, start[row], length[row], pl.program_id(1), write)


def _packed(ref: Any) -> int:
    """Returns how many numbers share a word of 32 bits."""
    return 4 // jnp.dtype(ref.dtype).itemsize


def _words(x: jax.Array) -> jax.Array:
    """Returns x as words, because lanes are rolled in words alone; those pack along rows."""
    return pltpu.bitcast(x, jnp.uint32)


def _numbers(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return pltpu.bitcast(x, dtype)
