"""Optimisers and schedules by name: rates by hand, states that resume and lie on the mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import micro_config, stepping_to_compile

from specrl_jax.config import ConfigError, LearnerConfig, MeshConfig
from specrl_jax.rl.optimizer import OPTIMIZERS, make_optimizer, make_schedule

NAMES = list(OPTIMIZERS)


@pytest.mark.parametrize("schedule, rates", [
    ("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 0.75, 0.5, 0.25, 0]),
    ("cosine", [0.5, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0])])
def test_schedule_by_hand(schedule: str, rates: list[float]) -> None:
    config = LearnerConfig(learning_rate=1.0, warmup_steps=1, schedule=schedule, decay_steps=4)
    np.testing.assert_allclose([make_schedule(config)(i) for i in range(6)], rates, atol=1e-6)
    np.testing.assert_allclose(make_schedule(config)(99), rates[-1], atol=1e-6)


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"qkv": (2, 3, 4, 8), "o": (8, 2, 1, 4), "gate_up": (2, 16, 8), "norm": (8,)}
    return {"embedding": jnp.asarray(rng.normal(size=(256, 128)), jnp.float32), "layers": [
        {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}]}


def steps(optimizer: optax.GradientTransformation, params: Any, count: int = 2) -> list[Any]:
    state, actual = optimizer.init(params), []
    for i in range(count):
        grads = jax.tree.map(lambda p, i=i: jnp.sin(p + i), params)
        updates, state = optimizer.update(grads, state, params)
        actual.append(updates)
        params = optax.apply_updates(params, updates)
    return actual


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_shrinks_by_rate_times_decay(name: str) -> None:
    config = LearnerConfig(optimizer=name, learning_rate=0.1)
    params = weights()
    without, = steps(make_optimizer(config), params, 1)
    decayed, = steps(make_optimizer(dataclasses.replace(config, weight_decay=0.5)), params, 1)
    jax.tree.map(lambda p, a, b: np.testing.assert_allclose(b - a, -0.05 * p, atol=1e-5),
                 params, without, decayed)


@pytest.mark.parametrize("stacked", [False, True])
def test_muon_makes_matrices_orthogonal_and_leaves_others(stacked: bool) -> None:
    params = weights()
    if stacked:  # as layers lie on a TPU
        params["layers"] = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), params["layers"][0])
    config = LearnerConfig(optimizer="muon", learning_rate=1.0)
    updates, = steps(make_optimizer(config), params, 1)
    adam, = steps(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adamw(
        1.0, b2=0.999, weight_decay=0, nesterov=True)), params, 1)
    layer = jax.tree.map(lambda a: a[0], updates["layers"]) if stacked else updates["layers"][0]
    for matrix in (layer["qkv"].reshape(24, 8), layer["o"].reshape(8, 8), layer["gate_up"][1]):
        sizes = np.linalg.svd(matrix / (0.2 * max(matrix.shape) ** 0.5), compute_uv=False)
        assert 0.6 < sizes.min() and sizes.max() < 1.3  # five Newton-Schulz steps
    np.testing.assert_allclose(updates["embedding"], adam["embedding"], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_state_lies_split_as_far_as_it_is_like_parameters(name: str) -> None:
    config = micro_config(mesh=MeshConfig(data=2, fsdp=2), learner=LearnerConfig(
        optimizer=name, micro_batch=16))
    trainer = stepping_to_compile(config)
    leaves = jax.tree.leaves(trainer.state.learner.optimizer)
    replicated = {a.shape: a.sharding.is_fully_replicated for a in leaves}
    like = [a.shape for a in jax.tree.leaves(trainer.params) if a.ndim > 1]
    assert not any(replicated[shape] for shape in like) and replicated[()]  # counts are everywhere
    a = max(leaves, key=lambda a: a.size)
    assert a.addressable_shards[0].data.size * 4 == a.size


@pytest.mark.parametrize("values, words", [
    (dict(optimizer="sgd"), "learner.optimizer = 'sgd': choose one of adamw, lion, muon, adafac"),
    (dict(schedule="exp"), "learner.schedule = 'exp': choose one of constant, linear, cosine"),
    (dict(schedule="cosine"), "learner.decay_steps = 0: give the updates in which the cosine"),
])
def test_names_that_are_unknown_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LearnerConfig(**values)
