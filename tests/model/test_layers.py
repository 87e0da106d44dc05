"""Stacked layers compute what a list of layers computes, and either form turns into the other."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_arch, tiny_params

from specrl_jax import sharding
from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import MeshConfig
from specrl_jax.model import layers, tensors, transformer
from specrl_jax.model.source import Actor
from specrl_jax.model.tiny import byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source
from specrl_jax.rollout.sampler import publisher
from specrl_jax.runtime.paths import CHECKPOINTS

ARCH = tiny_arch(num_layers=3, tied=False, qkv_bias=True)
PARAMS = tiny_params(ARCH)
STACKED = layers.arrange(PARAMS, stacked=True)
TOKENS = np.random.default_rng(0).integers(0, 24, (2, 9)).astype(np.int32)
LENGTH = jnp.asarray([4, 9])


def close(one: Any, other: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4), one, other)


def equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_arrange_there_and_back_changes_nothing() -> None:
    assert layers.arrange(PARAMS, stacked=False) is PARAMS
    equal(layers.arrange(STACKED, stacked=False), PARAMS)
    assert layers.identity(PARAMS) == layers.identity(STACKED)


@pytest.mark.parametrize("taps", [(), (0,), (0, 2)])
def test_stacked_layers_compute_what_a_list_does(taps: tuple[int, ...]) -> None:
    def run(params: Any) -> Any:
        return transformer.hidden_states(
            ARCH, params, TOKENS, *transformer.right_padded(TOKENS.shape, LENGTH), taps=taps)

    (hidden, cached, tapped), (wanted, pairs, wanted_taps) = jax.jit(run)(STACKED), run(PARAMS)
    close((hidden, tapped), (wanted, wanted_taps))
    close(cached, tuple(jnp.stack(each) for each in zip(*pairs, strict=True)))


def test_gradients_of_stacked_layers_equal_those_of_a_list() -> None:
    def loss(params: Any, remat: str) -> Any:
        hidden, _, _ = transformer.hidden_states(
            ARCH, params, TOKENS, *transformer.right_padded(TOKENS.shape, LENGTH), remat=remat)
        return jnp.square(transformer.logits(ARCH, params, hidden)).mean()

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    wanted = grad(PARAMS, "none")
    for remat in ("none", "full"):
        close(layers.arrange(grad(STACKED, remat), stacked=False), wanted)


def test_stacked_weights_unpack_to_the_same_tensors() -> None:
    equal(dict(tensors.unpack(ARCH, STACKED)), dict(tensors.unpack(ARCH, PARAMS)))


@pytest.mark.parametrize("stacked", [False, True])
def test_publishing_arranges_layers_as_the_rollout_reads_them(stacked: bool) -> None:
    mesh = sharding.make_mesh(MeshConfig())
    publish = publisher(ARCH, mesh, jnp.dtype(jnp.bfloat16), stacked)
    wanted = jax.tree.map(lambda a: a.astype(jnp.bfloat16), layers.arrange(PARAMS, stacked))
    for given in (PARAMS, STACKED, jax.tree.map(np.asarray, STACKED)):
        published = publish(given)
        equal(published, wanted)
        assert publish(published)["embed"] is published["embed"]


@pytest.mark.parametrize("stacked", [False, True])
def test_checkpoint_of_either_form_is_an_actor(tmp_path: Path, stacked: bool) -> None:
    mesh = sharding.make_mesh(MeshConfig())
    stored = jax.tree.map(lambda a: jax.device_put(a, sharding.replicated(mesh)),
                          layers.arrange(PARAMS, stacked))
    with Checkpoints(tmp_path / CHECKPOINTS, keep=1) as checkpoints:
        checkpoints.save(1, {"actor": stored}, {})
    source = Source(ARCH, byte_tokenizer(), random_tensors(ARCH, 0), "")
    actual = Actor(source, tmp_path, 1).params(mesh)
    equal(actual, layers.arrange(PARAMS, stacked))
