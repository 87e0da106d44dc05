"""Devices that share a vocabulary draw what one device draws, and gather no logits for it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import MeshConfig
from specrl_jax.verify import sampling

ROWS, WIDTH, VOCAB = P(sharding.ROWS), 32, 4096
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="see XLA_FLAGS in conftest.py")
MESHES = pytest.mark.parametrize("mesh", [(1, 1, 8), (2, 2, 2)], ids=["1x1x8", "2x2x2"])


def arguments(vocab: int = VOCAB) -> tuple[Any, ...]:
    """Of `sampling.draw`: all temperatures and truncations, and columns with many equal logits."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(vocab, WIDTH)) * 3
    logits[:, ::7] = np.round(logits[:, ::7])
    of = lambda values, dtype: jnp.asarray(np.resize(values, WIDTH), dtype)  # noqa: E731
    return (jnp.asarray(logits, jnp.float32), of([1, 0.5, 0, 2], jnp.float32),
            of([0, 1, 50, 1000, 0], jnp.int32), of([1, 0.9, 0.5], jnp.float32),
            jnp.asarray(rng.integers(0, 2**32, (WIDTH, 2)), jnp.uint32),
            jnp.arange(WIDTH, dtype=jnp.int32))


def sharded(mesh: tuple[int, int, int], truncates: bool, vocab: int) -> Callable[..., Any]:
    """The draw as a launch runs it: manual over the rows, the vocabulary split over `tensor`."""
    made = sharding.make_mesh(MeshConfig(*mesh))
    place = [sharding.spec_of((vocab, WIDTH), ("vocab", None), sharding.ROLLOUT_RULES, made)]
    wanted = [NamedSharding(made, spec) for spec in [P(place[0][0], sharding.ROWS), *[ROWS] * 5]]
    mapped = jax.shard_map(
        lambda logits, heat, top_k, top_p, *noise: sampling.draw(
            logits, heat, *((top_k, top_p) if truncates else (None, None)), *noise), mesh=made,
        in_specs=(P(None, sharding.ROWS), *[ROWS] * 5), out_specs=ROWS, check_vma=False,
        axis_names=set(sharding.ROWS))
    return jax.jit(mapped, in_shardings=wanted)


@MESHES
@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("vocab", [VOCAB, pytest.param(1001, id="indivisible")])
def test_tokens_are_those_of_one_device(mesh: Any, truncates: bool, vocab: int) -> None:
    heat_and_noise = arguments(vocab)
    alone = sampling.draw if truncates else lambda logits, heat, k, p, *noise: sampling.draw(
        logits, heat, None, None, *noise)
    want, got = jax.jit(alone)(*heat_and_noise), sharded(mesh, truncates, vocab)(*heat_and_noise)
    np.testing.assert_array_equal(got.token, want.token)
    for name in ("logprob", "raw_logprob", "top_p_mass"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=0, atol=3e-6)
