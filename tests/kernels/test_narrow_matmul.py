"""Products with few columns: exact to rounding, the same bits whatever the other columns are."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_tolerances import TOLERANCE
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.machine_code import runtime
from specrl_kernels.narrow_matmul import IMPLEMENTATIONS, narrow_matmul

SHAPES = [(1, 16), (13, 64), (96, 1536), (4097, 32)]
COLUMNS = [1, 2, 3, 4, 7, 8, 16, 31, 64, 131]


def arrays(rows, inner, columns, seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.standard_normal((rows, inner)), jnp.float32),
            jnp.asarray(rng.standard_normal((inner, columns)), jnp.float32))


def assert_near(actual, w, x):
    w, x, actual = (np.asarray(a, np.float64) for a in (w, x, np.asarray(actual, np.float32)))
    assert actual.shape == (w.shape[0], x.shape[1])
    scale = np.abs(w) @ np.abs(x)
    assert np.all(np.abs(actual - w @ x) <= TOLERANCE["narrow_matmul", "float32"] * scale)


@functools.cache
def compiled(implementation):
    return jax.jit(functools.partial(narrow_matmul, implementation=implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64(implementation, shape):
    for columns in COLUMNS:
        w, x = arrays(*shape, columns)
        assert_near(compiled(implementation)(w, x), w, x)


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_a_column_do_not_depend_on_others(shape):
    w, x = arrays(*shape, max(COLUMNS))
    alone = np.concatenate([compiled("machine")(w, x[:, i:i + 1]) for i in range(x.shape[1])], 1)
    for columns in COLUMNS:
        assert np.array_equal(compiled("machine")(w, x[:, :columns]), alone[:, :columns])


def test_bits_of_a_row_do_not_depend_on_others():
    w, x = arrays(101, 64, 5)
    whole = np.asarray(compiled("machine")(w, x))
    for start, stop in ((0, 1), (0, 6), (5, 18), (100, 101)):
        assert np.array_equal(compiled("machine")(w[start:stop], x), whole[start:stop])


def test_bits_with_many_calls_in_flight_are_equal():
    w, x = arrays(3000, 128, 8)
    many = jax.jit(lambda w, x: [narrow_matmul(w, x, implementation="machine") for _ in range(20)])
    want = np.asarray(compiled("machine")(w, x))
    for _ in range(10):
        assert all(np.array_equal(got, want) for got in many(w, x))


def test_non_finite_columns_stay_alone():
    w, x = arrays(64, 32, 6)
    want = np.asarray(compiled("machine")(w, x))
    got = np.asarray(compiled("machine")(w, x.at[:, 2].set(jnp.nan)))
    assert np.isnan(got[:, 2]).all()
    assert np.array_equal(np.delete(got, 2, 1), np.delete(want, 2, 1))


@pytest.mark.parametrize(("w", "x", "why"), [
    ((8, 20), (20, 2), "K = 20, no multiple of 16"),
    ((8, 0), (0, 2), "K = 0"), ((8, 16), (16, 0), "0 columns"),
    ((8, 16), (16, 2), "bfloat16: float32 only"),
])
def test_unsupported_call_is_refused_and_left_to_xla(w, x, why):
    w, x = (jnp.ones(shape, jnp.bfloat16 if "bfloat16" in why else None) for shape in (w, x))
    with pytest.raises(Unsupported, match=why):
        narrow_matmul(w, x, implementation="machine")
    actual = narrow_matmul(w, x)
    assert actual.dtype == jnp.float32 and np.array_equal(actual, np.asarray(w) @ np.asarray(x))


def test_without_the_code_generator(monkeypatch):
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    monkeypatch.setattr(runtime, "compiled", runtime.compiled.__wrapped__)
    w, x = arrays(8, 16, 2)
    with pytest.raises(Unsupported, match="needs the package llvmlite: pip install llvmlite"):
        narrow_matmul(w, x, implementation="machine")
    assert_near(narrow_matmul(w, x), w, x)


@pytest.mark.parametrize(("w", "x", "name"), [
    (jnp.ones((8, 16)), jnp.ones((8, 2)), r"\(8, 16\), \(8, 2\), expected"),
    (jnp.ones((8, 16)), jnp.ones((16, 2), jnp.bfloat16), "x.dtype = bfloat16, expected w's"),
])
def test_shapes_that_do_not_fit_are_named(w, x, name):
    with pytest.raises(ValueError, match=name):
        narrow_matmul(w, x)


@pytest.mark.parametrize("tensor", [1, 2])
def test_weights_that_the_compiler_may_split_are_left_to_xla(tensor):
    """Rows of x are split by hand, as a rollout's are; `tensor` is the compiler's."""
    mesh = jax.make_mesh((4 // tensor, tensor), ("data", "tensor"),
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)
    w, x = arrays(32, 16, 8)

    def product(w, x):
        return narrow_matmul(w, x, implementation="machine" if tensor == 1 else None)

    mapped = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(P(), P(None, "data")),
                                   out_specs=P(None, "data"), axis_names={"data"}))
    text = mapped.lower(w, x).as_text()
    assert ("specrl_narrow_matmul" in text) == (tensor == 1)
    assert_near(mapped(w, x), w, x)
