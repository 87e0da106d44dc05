"""The appends against a loop of NumPy; earlier entries keep their bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from specrl_kernels.cache_append import cache_append, row_append
from specrl_kernels.dispatch import Unsupported

IMPLEMENTATIONS = {
    "xla": {"implementation": "xla"},
    "pallas": {"implementation": "pallas",
               "interpret": pltpu.InterpretParams(uninitialized_memory="nan")}}
by_implementation = pytest.mark.parametrize(
    "options", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
# (start, count) of each row: a tile's last slot and the next one's first, both sides of that
# border, none at all, and the end of the cache.
BORDERS = [(127, 1), (128, 1), (126, 5), (124, 4), (128, 5), (77, 0), (0, 3), (251, 5)]


def append_by_hand(old: np.ndarray, new: np.ndarray, rows: list[tuple[int, int]]) -> np.ndarray:
    """Returns old [B, S, ...] with new [B, n, ...] written, by slices."""
    out = old.copy()
    for b, (start, count) in enumerate(rows):
        out[b, start:start + count] = new[b, :count]
    return out


def check(actual: Any, wanted: np.ndarray, rows: list[tuple[int, int]]) -> None:
    """Asserts equal bits up to each row's end; what follows is garbage by contract."""
    for b, (start, count) in enumerate(rows):
        np.testing.assert_array_equal(np.asarray(actual)[b, :start + count],
                                      wanted[b, :start + count])


@by_implementation
@pytest.mark.parametrize("rows, n, slots, dtype, config", [
    (BORDERS, 5, 256, jnp.bfloat16, None),
    (BORDERS, 5, 256, jnp.float32, {"layers": 1}),
    ([(at, min(count, 1)) for at, count in BORDERS], 1, 256, jnp.bfloat16, None),
    ([(120, 140), (128, 128), (9, 0)], 140, 384, jnp.float32, None),  # three tiles, a whole one
    ([(b, b % 3) for b in range(131)], 2, 256, jnp.bfloat16, {"layers": 2})],  # two blocks of lanes
    ids=["borders", "float32", "one", "prefill", "many rows"])
def test_cache_append_writes_what_a_loop_writes(
        rows: list[tuple[int, int]], n: int, slots: int, dtype: Any, config: Any, options: Any
        ) -> None:
    layers, heads, e, rng = 2, 1 + (n < 100), 16, np.random.default_rng(0)
    caches = [jnp.asarray(rng.standard_normal((len(rows), layers, heads, e, slots)), dtype)
              for _ in range(2)]
    new = jnp.asarray(rng.standard_normal((n, layers, 2, heads, e, len(rows))), dtype)
    if options["implementation"] == "pallas":
        options = options | {"config": config}
    start, count = jnp.asarray(rows, jnp.int32).T
    out = cache_append(caches, new, start, count, **options)
    for i, (cache, actual) in enumerate(zip(caches, out, strict=True)):
        wanted = append_by_hand(np.moveaxis(np.asarray(cache), -1, 1),
                                np.moveaxis(np.asarray(new)[:, :, i], (-1, 0), (0, 1)), rows)
        check(jnp.moveaxis(actual, -1, 1), wanted, rows)


@by_implementation
@pytest.mark.parametrize("rows, n, dtype", [
    ([(15, 1), (16, 1), (3, 0)], 1, jnp.bfloat16), ([(14, 4), (12, 4), (60, 4)], 4, jnp.bfloat16),
    ([(7, 3), (8, 0), (61, 3)], 3, jnp.float32), ([(5, 40), (0, 48)], 48, jnp.bfloat16)],
    ids=["one", "borders", "float32", "prefill"])
def test_row_append_writes_what_a_loop_writes(
        rows: list[tuple[int, int]], n: int, dtype: Any, options: Any) -> None:
    rng = np.random.default_rng(0)
    array = jnp.asarray(rng.standard_normal((len(rows), 64, 128)), dtype)
    new = jnp.asarray(rng.standard_normal((len(rows), n, 128)), dtype)
    start, count = jnp.asarray(rows, jnp.int32).T
    check(row_append(array, new, start, count, **options),
          append_by_hand(np.asarray(array), np.asarray(new), rows), rows)


def test_unfit_arguments_are_refused() -> None:
    zeros, at = jnp.zeros, jnp.zeros(3, jnp.int32)
    options: Any = IMPLEMENTATIONS["pallas"]
    with pytest.raises(ValueError, match="new must be"):
        cache_append([zeros((3, 1, 1, 16, 128))], zeros((1, 1, 2, 1, 16, 3)), at, at)
    with pytest.raises(ValueError, match="new must be"):
        row_append(zeros((3, 16, 128)), zeros((3, 1, 64)), at, at)
    with pytest.raises(Unsupported, match="100 slots"):
        cache_append([zeros((3, 1, 1, 16, 100))], zeros((1, 1, 1, 1, 16, 3)), at, at, **options)
    with pytest.raises(Unsupported, match="64 numbers"):
        row_append(zeros((3, 16, 64)), zeros((3, 1, 64)), at, at, **options)
    with pytest.raises(Unsupported, match="layers must divide 1"):
        cache_append([zeros((3, 1, 1, 16, 128))], zeros((1, 1, 1, 1, 16, 3)), at, at,
                     config={"layers": 2}, **options)


def test_each_device_appends_to_its_own_heads() -> None:
    if jax.device_count() < 8:
        pytest.skip("see XLA_FLAGS in tests/conftest.py")
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    rng, rows = np.random.default_rng(0), [(127, 2), (4, 1)]
    cache = jnp.asarray(rng.standard_normal((2, 1, 2, 16, 256)), jnp.bfloat16)
    new = jnp.asarray(rng.standard_normal((2, 1, 1, 2, 16, 2)), jnp.bfloat16)
    start, count = jnp.asarray(rows, jnp.int32).T
    alone, = cache_append([cache], new, start, count, implementation="xla")
    heads = jax.NamedSharding(mesh, jax.P(None, None, "tensor"))
    with jax.set_mesh(mesh):
        split, = jax.jit(lambda *args: cache_append([args[0]], *args[1:], implementation="xla"))(
            jax.device_put(cache, heads), new, start, count)
    assert split.sharding.is_equivalent_to(heads, split.ndim)
    np.testing.assert_array_equal(split, alone)
