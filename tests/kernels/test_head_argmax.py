"""The draw from a head against the perturbed argmax of its logits.

On a CPU kernels are interpreted; experiments/bench.py contract runs the same cases on a GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.gumbel_argmax import Drawn, gumbel_argmax
from specrl_kernels.head_argmax import IMPLEMENTATIONS, head_argmax
from tree_attention_cases import INTERPRET, KERNELS

# Memory that nobody wrote to holds NaN, also where Triton's kernels are interpreted.
POISON = {"pallas": pltpu.InterpretParams(uninitialized_memory="nan")}
OPTIONS: dict[str, dict[str, Any]] = {
    name: {"implementation": name, "interpret": INTERPRET and POISON.get(name, True)}
    for name in KERNELS if name in IMPLEMENTATIONS}
BF16, F32 = jnp.bfloat16, jnp.float32
# (features, vocabulary, positions, dtype, configuration)
CASES: dict[str, list[tuple[int, int, int, Any, dict[str, int] | None]]] = {
    "pallas": [
        (128, 1024, 1, F32, {"block": 1024}), (128, 3000, 16, BF16, {"block": 1024}),
        (256, 2500, 20, BF16, {"block": 2048}), (128, 2049, 40, F32, {"block": 1024}),
        (128, 2047, 128, BF16, None), (128, 1500, 130, BF16, {"block": 1024})],
    "pallas_triton": [
        (64, 512, 1, F32, {"block": 64}), (128, 3000, 16, BF16, None),
        (576, 300, 20, BF16, {"tile": 32, "block": 16}), (896, 129, 3, F32, None),
        (48, 2047, 130, BF16, None), (128, 16, 5, F32, None)]}
by_kernel = pytest.mark.parametrize("name", OPTIONS)


def inputs(features: int, vocab: int, width: int, dtype: Any, seed: int = 0) -> tuple[Any, ...]:
    """Returns arguments of `head_argmax`; a third of the positions are greedy."""
    rng = np.random.default_rng(seed)
    hidden, head = (jnp.asarray(rng.standard_normal(shape) / 3, dtype)
                    for shape in ((features, width), (vocab, features)))
    temperature = jnp.asarray(np.where(rng.random(width) < 0.3, 0, rng.uniform(0.5, 1.5, width)),
                              jnp.float32)
    key = jnp.asarray(rng.integers(0, 2**32, (width, 2), dtype=np.uint32))
    return hidden, head, temperature, key, jnp.asarray(rng.integers(0, 50, width), jnp.int32)


def check(actual: Drawn, wanted: Drawn) -> None:
    np.testing.assert_array_equal(actual.token, wanted.token)
    for name in ("perturbed", "logprob", "raw_logprob"):
        np.testing.assert_allclose(getattr(actual, name), getattr(wanted, name), atol=1e-5)


@pytest.mark.parametrize("name, features, vocab, width, dtype, config", [
    (name, *case) for name in OPTIONS for case in CASES[name]])
def test_draw_is_that_from_logits(name: str, features: int, vocab: int, width: int, dtype: Any,
                                  config: dict[str, int] | None) -> None:
    args = inputs(features, vocab, width, dtype)
    hidden, head, *rest = args
    logits = jnp.tensordot(head, hidden, 1, preferred_element_type=jnp.float32)
    wanted = gumbel_argmax(logits.T, *rest)
    check(head_argmax(*args, **OPTIONS[name], config=config), wanted)
    check(head_argmax(*args, implementation="xla"), wanted)


@by_kernel
def test_equal_scores_give_the_lower_id_and_no_number_a_token(name: str) -> None:
    """Rows 700 and 1,900 are equal, in one block or two, in one part of a register or two."""
    hidden, head, _, key, position = inputs(128, 2048, 3, F32)
    best = hidden[:, 0] * 100
    head = head.at[jnp.array([1900, 700])].set(best)
    greedy = jnp.zeros(3)
    for block in (1024, 2048):
        out = head_argmax(hidden.at[:, 1].set(jnp.nan), head, greedy, key, position,
                          **OPTIONS[name], config={"block": block})
        assert out.token[0, 0] == 700 and out.logprob[0, 0] == 0
        assert 0 <= int(out.token[1, 0]) < 2048 and np.isnan(out.raw_logprob[1, 0])
        assert np.isfinite(out.raw_logprob[2, 0])


@pytest.mark.skipif(jax.device_count() < 8, reason="see XLA_FLAGS in tests/conftest.py")
@pytest.mark.parametrize("name", [*OPTIONS, "xla"])
def test_devices_that_share_a_vocabulary_draw_as_one(name: str) -> None:
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    args, spec = inputs(128, 2500, 9, F32), jax.P("tensor")
    options = OPTIONS.get(name, {"implementation": name})
    split = jax.jit(jax.shard_map(
        lambda hidden, head, *rest: head_argmax(hidden, head, *rest, axis="tensor", **options),
        mesh=mesh, in_specs=(jax.P(), spec, jax.P(), jax.P(), jax.P()), out_specs=jax.P(),
        check_vma=False))(*args)
    check(split, head_argmax(*args, implementation="xla"))


def test_shapes_that_do_not_fit_are_refused() -> None:
    args = inputs(128, 1024, 3, F32)
    with pytest.raises(ValueError, match=r"position: \(2,\) should be \(3,\)"):
        head_argmax(*args[:4], args[4][:2])


@pytest.mark.parametrize("name, features, vocab, config, reason", [
    ("pallas", 100, 1024, None, "100 features"),
    ("pallas", 128, 1024, {"block": 512}, "must be a multiple of 1024"),
    ("pallas_triton", 100, 1024, None, "100 features: must be a multiple of 16"),
    ("pallas_triton", 128, 15, None, "15 tokens: at least 16"),
    ("pallas_triton", 128, 100, {"block": 128}, "100 tokens: at least 128"),
    ("pallas_triton", 128, 1024, {"block": 48}, "powers of two, at least 16"),
    ("pallas_triton", 96, 1024, {"depth": 64}, "depth must divide 96 features"),
    ("pallas_triton", 128, 1024, {"warps": 3}, "warps are a power of two")])
def test_kernel_refuses_what_it_cannot_do(name: str, features: int, vocab: int,
                                          config: dict[str, int] | None, reason: str) -> None:
    if name not in OPTIONS:
        pytest.skip(f"{name}: not of this device")
    with pytest.raises(Unsupported, match=reason):
        head_argmax(*inputs(features, vocab, 3, F32), **OPTIONS[name], config=config)
