"""The contract of the perturbed argmax, run against every implementation but the oracle.

experiments/bench.py contract runs the same cases on a GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_attention_cases as cases
from kernel_tolerances import TOLERANCE
from specrl_kernels import noise
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.gumbel_argmax import (
    IMPLEMENTATIONS,
    Drawn,
    Threshold,
    gumbel_argmax,
    scale_of,
)

# Small chunks, so that a vocabulary of a few hundred tokens has several, the last one ragged.
CONFIGS = {"xla": {"chunk": 100}}
NAMES = [name for name in IMPLEMENTATIONS if name != "reference"]
NEAR = TOLERANCE["gumbel_argmax", "float32"]
assert NEAR == TOLERANCE["gumbel_argmax", "bfloat16"]  # bfloat16 logits are exact in float32
each = pytest.mark.parametrize("implementation", NAMES)
full = pytest.mark.full

Case = dict[str, Any]


def make(width: int = 5, vocab: int = 300, spread: float = 3.0, dtype: str = "float32",
         kept: float | None = None, seed: int = 0) -> Case:
    """Random inputs of all temperatures; `kept` is the share of tokens that truncation leaves."""
    rng = np.random.default_rng(seed)
    case = {"logits": jnp.asarray(rng.normal(size=(width, vocab)) * spread, dtype),
            "temperature": jnp.asarray(np.resize([1.0, 0.0, 0.6, 2.5], width), jnp.float32),
            "key": jnp.asarray(rng.integers(0, 2**32, (width, 2)), jnp.uint32),
            "position": jnp.asarray(rng.integers(0, 2**20, width), jnp.int32)}
    if kept is not None:
        case["threshold"] = threshold(case, max(1, int(kept * vocab)))
    return case


def threshold(case: Case, count: int) -> Threshold:
    """Keeps the `count` highest scores of each position, of equal ones the first."""
    logits = np.asarray(case["logits"], np.float32)
    score = logits * np.asarray(scale_of(case["temperature"])[0])[:, None]
    order = np.argsort(-score, 1, kind="stable")[:, :count]
    last = order[:, -1]
    p = np.exp(score.astype(np.float64) - score.max(1, keepdims=True))
    mass = np.take_along_axis(p, order, 1).sum(1) / p.sum(1)
    return Threshold(jnp.asarray(np.take_along_axis(score, last[:, None], 1)[:, 0]),
                     jnp.asarray(last, jnp.int32), jnp.asarray(mass, jnp.float32))


def call(case: Case, implementation: str, count: int = 1, **config: int) -> Drawn:
    """As numpy; in small chunks."""
    chosen = tuple((CONFIGS.get(implementation, {}) | config).items())
    return jax.tree.map(np.asarray, _jitted(case, implementation, count, chosen))


@functools.partial(jax.jit, static_argnames=("implementation", "count", "config"),
                   compiler_options=cases.COMPILER)
def _jitted(case: Case, implementation: str, count: int, config: Any) -> Drawn:
    return gumbel_argmax(**case, count=count, implementation=implementation, config=dict(config))


def wanted(case: Case, count: int = 1) -> Drawn:
    return jax.tree.map(np.asarray, gumbel_argmax(**case, count=count, implementation="reference"))


def assert_same(actual: Drawn, right: Drawn, near: float = NEAR) -> None:
    """The same tokens, but for ties within rounding; and what is said of them."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=near)
    close(actual.perturbed, right.perturbed)
    there = np.isfinite(right.perturbed)
    clear = there & _gaps(right.perturbed)
    np.testing.assert_array_equal(actual.token[clear], right.token[clear])
    for name in ("logprob", "raw_logprob"):
        a, b = getattr(actual, name), getattr(right, name)
        if name == "raw_logprob":
            a, b = np.where(there, a, 0), np.where(there, b, 0)
        close(np.where(clear | ~there, a, b), b)
    assert (clear | ~there).mean() > 0.9  # it was a comparison


def _gaps(perturbed: np.ndarray) -> np.ndarray:
    """Whether a candidate is further than rounding from its neighbours."""
    with np.errstate(invalid="ignore"):
        gap = -np.diff(perturbed, axis=1, prepend=np.inf, append=-np.inf)
    return (gap[:, :-1] > 10 * NEAR) & (gap[:, 1:] > 10 * NEAR)


CASES = {
    "one position": dict(width=1), "fewer tokens than a chunk": dict(vocab=7),
    "a chunk and a token": dict(vocab=101, width=2), "far apart": dict(spread=1e4),
    "flat": dict(spread=1e-3), "half precision": dict(dtype="bfloat16", width=18),
    "truncated": dict(kept=0.1)}
MORE = {"more than a register": dict(width=19), "one token kept": dict(kept=0.0),
        "half precision, truncated": dict(dtype="bfloat16", kept=0.5)}


@pytest.mark.parametrize("kept", [None, 0.1])
def test_oracle_equals_the_definition(kept: float | None) -> None:
    """Every implementation is compared with it; this compares it with JAX's own operations."""
    case = make(width=8, kept=kept)
    actual, cold = wanted(case, 3), np.asarray(case["temperature"]) == 0
    heat = np.where(cold, 1, case["temperature"])[:, None]
    raw = np.asarray(jax.nn.log_softmax(case["logits"] / heat))
    drawn = noise.gumbel(case["key"], case["position"], jnp.arange(raw.shape[1]))
    perturbed = raw + np.where(cold[:, None], 0, drawn)
    mass = 1.0
    if kept:
        left = np.argsort(np.argsort(-raw)) < kept * raw.shape[1]
        perturbed, mass = np.where(left, perturbed, -np.inf), np.exp(raw).sum(1, where=left)
    best = np.argsort(-perturbed)[:, :3]
    np.testing.assert_array_equal(actual.token, best)
    said = np.take_along_axis(raw, best, 1)
    np.testing.assert_allclose(actual.perturbed, np.take_along_axis(perturbed, best, 1), atol=1e-4)
    np.testing.assert_allclose(actual.raw_logprob, said, atol=1e-4)
    np.testing.assert_allclose(actual.logprob[~cold], (said.T - np.log(mass)).T[~cold], atol=1e-4)
    np.testing.assert_array_equal(actual.logprob[cold], [[0, -np.inf, -np.inf]] * cold.sum())


@each
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=full) for name in MORE)])
def test_equals_the_oracle(name: str, implementation: str) -> None:
    case = make(**(CASES | MORE)[name])
    assert_same(call(case, implementation), wanted(case))


@each
@pytest.mark.parametrize("kept,count", [(None, 4), (0.02, 4), pytest.param(None, 16, marks=full)])
def test_children_are_the_best_in_order(kept: float | None, count: int, implementation: str
                                        ) -> None:
    case = make(width=8, kept=kept)  # 6 tokens are left of 300
    actual = call(case, implementation, count)
    assert_same(actual, wanted(case, count))
    left = actual.perturbed > -np.inf
    assert (left.sum(1) == min(count, 6 if kept else count)).all()
    for tokens, there in zip(actual.token, left, strict=True):
        assert len(set(tokens[there])) == there.sum()
        assert ((0 <= tokens) & (tokens < 300)).all()


@each
@pytest.mark.parametrize("kept", [None, 0.5])
def test_children_whose_probability_underflows(kept: float | None, implementation: str) -> None:
    """At low temperatures the second token may be hundreds of nats below the first."""
    case = make(width=8, kept=kept, spread=300.0)
    actual, right = call(case, implementation, 4), wanted(case, 4)
    assert np.isfinite(actual.perturbed).all() and actual.raw_logprob.min() < -200
    np.testing.assert_array_equal(actual.token, right.token)
    for a, b in zip(actual[1:], right[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=200 * NEAR)  # scores of a thousand


@each
def test_ties_go_to_the_lower_id(implementation: str) -> None:
    """At temperature 0, with equals in different chunks; truncation cuts between two equals."""
    logits = np.zeros((2, 300), np.float32)
    logits[:, [37, 70, 71, 150, 299]] = 4.0
    case = make(width=2) | {"logits": jnp.asarray(logits), "temperature": jnp.zeros(2)}
    case["threshold"] = threshold(case, 5)
    assert call(case, implementation, 5).token.tolist() == [[37, 70, 71, 150, 299]] * 2
    case["threshold"] = threshold(case, 3)
    actual = call(case, implementation, 5)
    assert actual.token[:, :3].tolist() == [[37, 70, 71]] * 2
    assert np.isneginf(actual.perturbed[:, 3:]).all()


@each
def test_bits_are_repeatable_and_of_their_position_alone(implementation: str) -> None:
    """Nor do they depend on how many children are drawn: the first is the argmax."""
    case = make(width=8, kept=0.02)
    actual = call(case, implementation, 4)
    order = np.asarray([4, 0, 2, 7, 1, 3, 6, 5])
    moved = call(jax.tree.map(lambda x: x[order], case), implementation, 4)
    again = call(jax.tree.map(jnp.copy, case), implementation, 4)
    for a, other, same, one in zip(actual, moved, again, call(case, implementation), strict=True):
        np.testing.assert_array_equal(other, a[order])
        np.testing.assert_array_equal(same, a)
        np.testing.assert_array_equal(one[:, 0], a[:, 0])


@each
def test_tokens_that_cannot_be_are_never_drawn(implementation: str) -> None:
    """Logits of -inf, in whole chunks too."""
    case = make(width=8)
    allowed = np.isin(np.arange(300), [5, 133, 134])
    case["logits"] = jnp.where(allowed[None], case["logits"], -jnp.inf)
    actual = call(case, implementation, 4)
    assert np.isin(actual.token[:, :3], [5, 133, 134]).all()
    assert np.isneginf(actual.perturbed[:, 3]).all()
    assert_same(actual, wanted(case, 4))


@each
def test_sharded_over_positions(implementation: str) -> None:
    """In `shard_map` each device has its positions, as a kernel needs it."""
    cases.need_devices(4)
    case = make(width=8, kept=0.5)
    mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4],
                         axis_types=(jax.sharding.AxisType.Auto,))
    local = functools.partial(call_local, implementation=implementation)
    rows = jax.sharding.PartitionSpec("rows")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    assert_same(jax.tree.map(np.asarray, jax.jit(sharded)(case)), wanted(case, 2))


def call_local(case: Case, implementation: str) -> Drawn:
    return gumbel_argmax(**case, count=2, implementation=implementation)


@each
@pytest.mark.parametrize("name", ["half precision", "far apart", "truncated"])
def test_sharded_over_the_vocabulary(name: str, implementation: str) -> None:
    """Devices draw among their parts, with the ids of the whole, and agree on the best."""
    case, count = make(**CASES[name]), 1 if name == "far apart" else 4
    actual = call_in_parts(case, implementation, count)
    # Whether logits times scale is rounded before the highest score is subtracted is XLA's choice.
    rounding = float(np.spacing(np.abs(case["logits"]).max()))
    assert_same(actual, wanted(case, count), max(NEAR, rounding))
    if implementation == "xla":
        np.testing.assert_array_equal(actual.token, call(case, implementation, count).token)


def call_in_parts(case: Case, implementation: str, count: int) -> Drawn:
    cases.need_devices(4)
    mesh = jax.make_mesh((4,), ("part",), devices=jax.devices()[:4],
                         axis_types=(jax.sharding.AxisType.Auto,))
    local = functools.partial(
        gumbel_argmax, count=count, axis="part", config=CONFIGS[implementation],
        implementation=implementation)
    specs = {name: jax.sharding.PartitionSpec(None, "part") if name == "logits" else
             jax.sharding.PartitionSpec() for name in case}
    sharded = jax.shard_map(lambda case: local(**case), mesh=mesh, in_specs=(specs,),
                            out_specs=jax.sharding.PartitionSpec(), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(sharded, compiler_options=cases.COMPILER)(case))


@each
@pytest.mark.parametrize("draw", [call, call_in_parts])
def test_row_that_is_not_finite_changes_no_other(draw: Any, implementation: str) -> None:
    case = make(width=5)
    clean = draw(case, implementation, 1)
    case["logits"] = case["logits"].at[2, 100].set(jnp.nan)
    actual = draw(case, implementation, 1)
    assert ((0 <= actual.token) & (actual.token < 300)).all()
    others = np.arange(5) != 2
    for a, b in zip(actual, clean, strict=True):
        np.testing.assert_array_equal(a[others], b[others])


@each
def test_default_configuration(implementation: str) -> None:
    case = make(width=3, vocab=5000, kept=0.5)
    actual = gumbel_argmax(**case, count=2, implementation=implementation)
    assert_same(jax.tree.map(np.asarray, actual), wanted(case, 2))


I32 = jnp.int32
UNNAMED = {"config": {"chunk": 128}}
SHAPES = [  # refused while tracing
    ({"logits": jnp.zeros(300)}, r"logits = \(300,\), expected \[W, V\]"),
    ({"logits": jnp.zeros((5, 300), jnp.float16)}, "logits is float16"),
    ({"key": jnp.zeros((5, 3), jnp.uint32)}, "key = "), ({"key": jnp.zeros((5, 2), I32)}, "key is"),
    ({"threshold": Threshold(jnp.zeros(5), jnp.zeros(5, I32), jnp.ones(2))}, "threshold.kept_mass"),
    ({"count": 0}, "count = 0, expected 1 to 300"), ({"count": 301}, "count = 301"),
    ({"implementation": "fast"}, "'fast': choose one of xla, reference"),
    (UNNAMED, "name the implementation"), ({"checked": True}, "checked = True inside of jit"),
    (UNNAMED | {"implementation": "reference"}, "takes none"),
    ({"implementation": "xla", "config": {"chunk": 0}}, "at least one token")]
VALUES = [
    ({"temperature": jnp.full(5, -1.0)}, r"temperature\[0\] = -1.0, expected 0 or above"),
    ({"position": jnp.arange(5) - 2}, r"position\[0\] = -2"),
    ({"logits": jnp.full((5, 300), jnp.nan)}, r"logits\[0\] = nan, expected a finite highest"),
    ({"threshold": Threshold(jnp.full(5, 1e9), jnp.zeros(5, I32), jnp.ones(5))}, "threshold.score"),
    ({"threshold": Threshold(jnp.zeros(5), jnp.zeros(5, I32), jnp.zeros(5))}, "kept_mass.* = 0.0")]


@pytest.mark.parametrize("wrong,message", [*SHAPES, *VALUES])
def test_bad_input_is_named(wrong: Case, message: str) -> None:
    """Shapes are checked always, values if asked for."""
    values, arrays = any(wrong is one for one, _ in VALUES), make() | wrong
    options = {name: arrays.pop(name) for name in tuple(arrays)
               if name in ("count", "implementation", "config", "checked")}
    with pytest.raises((ValueError, Unsupported), match=message):
        if values:
            gumbel_argmax(**arrays, checked=True)
        else:
            jax.eval_shape(lambda arrays: gumbel_argmax(**arrays, **options), arrays)


def test_good_values_pass_the_check() -> None:
    assert gumbel_argmax(**make(kept=0.5), checked=True).token.shape == (5, 1)
