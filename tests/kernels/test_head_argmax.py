"""The draw from a head against the perturbed argmax of its logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.gumbel_argmax import Drawn, gumbel_argmax
from specrl_kernels.head_argmax import head_argmax

PALLAS: dict[str, Any] = {"implementation": "pallas",
                          "interpret": pltpu.InterpretParams(uninitialized_memory="nan")}


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


@pytest.mark.parametrize("features, vocab, width, dtype, block", [
    (128, 1024, 1, jnp.float32, 1024), (128, 3000, 16, jnp.bfloat16, 1024),
    (256, 2500, 20, jnp.bfloat16, 2048), (128, 2049, 40, jnp.float32, 1024),
    (128, 2047, 128, jnp.bfloat16, None), (128, 1500, 130, jnp.bfloat16, 1024)])
def test_draw_is_that_from_logits(features: int, vocab: int, width: int, dtype: Any,
                                  block: int | None) -> None:
    args = inputs(features, vocab, width, dtype)
    hidden, head, *rest = args
    logits = jnp.tensordot(head, hidden, 1, preferred_element_type=jnp.float32)
    wanted = gumbel_argmax(logits.T, *rest)
    check(head_argmax(*args, **PALLAS, config=block and {"block": block}), wanted)
    check(head_argmax(*args, implementation="xla"), wanted)


def test_equal_scores_give_the_lower_id_and_no_number_a_token() -> None:
    """Rows 700 and 1,900 are equal, in one block or two, in one part of a register or two."""
    hidden, head, _, key, position = inputs(128, 2048, 3, jnp.float32)
    best = hidden[:, 0] * 100
    head = head.at[jnp.array([1900, 700])].set(best)
    greedy = jnp.zeros(3)
    for block in (1024, 2048):
        out = head_argmax(hidden.at[:, 1].set(jnp.nan), head, greedy, key, position, **PALLAS,
                          config={"block": block})
        assert out.token[0, 0] == 700 and out.logprob[0, 0] == 0
        assert 0 <= int(out.token[1, 0]) < 2048 and np.isnan(out.raw_logprob[1, 0])
        assert np.isfinite(out.raw_logprob[2, 0])


@pytest.mark.skipif(jax.device_count() < 8, reason="see XLA_FLAGS in tests/conftest.py")
def test_devices_that_share_a_vocabulary_draw_as_one() -> None:
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    args, spec = inputs(128, 2500, 9, jnp.float32), jax.P("tensor")
    for options in (PALLAS, {"implementation": "xla"}):
        split = jax.jit(jax.shard_map(
            lambda hidden, head, *rest, o=options: head_argmax(
                hidden, head, *rest, axis="tensor", **o),
            mesh=mesh, in_specs=(jax.P(), spec, jax.P(), jax.P(), jax.P()), out_specs=jax.P(),
            check_vma=False))(*args)
        check(split, head_argmax(*args, implementation="xla"))


def test_unfit_arguments_are_refused() -> None:
    args = inputs(128, 1024, 3, jnp.float32)
    with pytest.raises(ValueError, match=r"position: \(2,\) should be \(3,\)"):
        head_argmax(*args[:4], args[4][:2])
    with pytest.raises(Unsupported, match="100 features"):
        head_argmax(*inputs(100, 1024, 3, jnp.float32), **PALLAS)
    with pytest.raises(Unsupported, match="must be a multiple of 1024"):
        head_argmax(*args, **PALLAS, config={"block": 512})
