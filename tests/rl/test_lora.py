"""Low-rank adapters: what is trained, what it equals, and what rollouts and checkpoints hold."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    counting,
    micro_config,
    stepping,
    stepping_to_compile,
    tiny_arch,
    tiny_params,
)

from specrl_jax import sharding
from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import ConfigError, LearnerConfig, MeshConfig, RewardConfig, RLConfig
from specrl_jax.config.sections import LORA_TARGETS
from specrl_jax.model import architecture, layers, lora
from specrl_jax.model.source import Actor
from specrl_jax.model.tiny import byte_tokenizer, random_tensors
from specrl_jax.model.transformer import forward
from specrl_jax.model.weights import Source
from specrl_jax.runtime.paths import CHECKPOINTS
from specrl_jax.structs import Params
from specrl_jax.training.saving import restore

ARCH = tiny_arch(qkv_bias=True, qk_norm=True)
OPTIONS = LearnerConfig(lora_rank=2, lora_alpha=6.0)
LEARNER = LearnerConfig(learning_rate=1e-2, micro_batch=16, max_grad_norm=1e9, lora_rank=4)


@functools.cache
def weights() -> Params:
    return tiny_params(ARCH)


def some_adapters(options: LearnerConfig, stacked: bool = False) -> Params:
    """Adapters whose B is not zero."""
    rng = np.random.default_rng(1)
    start = lora.initialize(ARCH, options, 0, stacked=False)
    moved = jax.tree.map(lambda a: (a + 0.3 * rng.standard_normal(a.shape)).astype(np.float32),
                         start)
    return layers.arrange(moved, stacked)


def merged(options: LearnerConfig, base: Params, adapters: Params) -> Params:
    return lora.overlay(base, lora.merge(options, jnp.float32, base, adapters))


def logits(params: Params) -> Any:
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    return jax.jit(functools.partial(forward, ARCH))(params, tokens, np.asarray([6, 4], np.int32))


@pytest.mark.parametrize("targets", [LORA_TARGETS, ("k_proj",), ("o_proj", "up_proj")])
def test_merged_weights_equal_the_products_beside_them(targets: tuple[str, ...]) -> None:
    options = dataclasses.replace(OPTIONS, lora_targets=targets)
    adapters = some_adapters(options)
    beside = logits(lora.attach(options, weights(), adapters))
    np.testing.assert_allclose(beside, logits(merged(options, weights(), adapters)), atol=2e-4)
    assert np.abs(beside - logits(weights())).max() > 0.1


def test_merged_matrix_is_w_plus_alpha_over_rank_b_a() -> None:
    adapters = some_adapters(OPTIONS)
    layer, pair = weights()["layers"][1], adapters["layers"][1]
    actual = merged(OPTIONS, weights(), adapters)["layers"][1]
    want = layer["down"] + 6 / 2 * pair["down_proj"]["b"] @ pair["down_proj"]["a"]
    np.testing.assert_allclose(actual["down"], want, rtol=1e-5, atol=1e-6)
    key = (pair["k_proj"]["b"].reshape(-1, 2) @ pair["k_proj"]["a"]).reshape(2, 4, 16)
    np.testing.assert_allclose(actual["qkv"][:, ARCH.group], layer["qkv"][:, ARCH.group] + 3 * key,
                               rtol=1e-5, atol=1e-6)
    assert actual["qkv_bias"] is layer["qkv_bias"]


def test_stacked_layers_compute_the_same() -> None:
    base, adapters = layers.arrange(weights(), True), some_adapters(OPTIONS, stacked=True)
    want = logits(lora.attach(OPTIONS, weights(), some_adapters(OPTIONS)))
    np.testing.assert_allclose(logits(lora.attach(OPTIONS, base, adapters)), want, atol=1e-5)
    np.testing.assert_allclose(logits(merged(OPTIONS, base, adapters)), want, atol=2e-4)
    described = lora.describe(ARCH, OPTIONS, stacked=True)
    assert jax.tree.map(lambda p: p.shape, described, is_leaf=architecture.is_param) == (
        jax.tree.map(np.shape, adapters))


@pytest.mark.parametrize("fields, error", [
    (dict(lora_alpha=2.0), "learner.lora_alpha = 2.0: .*set learner.lora_rank"),
    (dict(lora_targets=("q", "o_proj")), "no projection is called q; choose from q_proj, k_proj"),
    (dict(lora_targets=()), "name at least one"),
    (dict(lora_targets=("q_proj", "q_proj")), "each once"),
    (dict(lora_rank=2, optimizer="muon"), "learner.optimizer = 'muon'"),
    (dict(lora_rank=-1), "learner.lora_rank = -1")])
def test_options_that_cannot_work_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        LearnerConfig(**fields)


def advantages(config: Any) -> np.ndarray:
    return np.tile(np.asarray([1, -1], np.float32), config.sequences // 2)


@pytest.fixture(scope="module")
def steps() -> Any:
    """A trainer with adapters, its first rollout, and that of full fine-tuning."""
    config = micro_config(learner=LEARNER)
    one, full = stepping(config), stepping_to_compile(
        dataclasses.replace(config, learner=dataclasses.replace(LEARNER, lora_rank=0)))
    return one, one.rollout()[0], full.rollout()[0]


def test_first_tokens_are_the_base_models(steps: Any) -> None:
    _, mine, theirs = steps
    for name in ("tokens", "length", "raw_logprob"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


def test_update_trains_adapters_and_publishes_merged(steps: Any) -> None:
    trainer, rollout, _ = steps
    before = jax.tree.map(np.asarray, trainer.policy.frozen.base)
    for _ in range(2):  # the first moves B alone, because it is zero
        actual: dict[str, Any] = {}
        assert counting(lambda out=actual: out.update(
            trainer.learn(rollout, advantages(trainer.config)))) == 0
        assert actual["applied"] == 1 and actual["grad_norm"] > 0
    assert all(np.any(leaf) for leaf in jax.tree.leaves(trainer.params))
    jax.tree.map(np.testing.assert_array_equal, trainer.policy.frozen.base, before)
    want = merged(LEARNER, trainer.policy.frozen.base, trainer.params)
    jax.tree.map(np.testing.assert_array_equal, trainer.published, jax.tree.map(
        np.asarray, want))
    assert trainer.published["embed"] is trainer.policy.frozen.base["embed"]
    assert not np.array_equal(trainer.published["layers"][0]["o"],
                              trainer.policy.frozen.base["layers"][0]["o"])
    kinds = {path[0].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(
        trainer.saved().arrays)}
    assert {"actor", "optimizer"} <= set(kinds)
    largest = max(leaf.size for leaf in jax.tree.leaves(
        [trainer.saved().arrays[key] for key in ("actor", "optimizer")]))
    assert largest <= 4 * max(trainer.arch.intermediate_size, 16 * 8)


def saved(trainer: Any, folder: Path, step: int) -> None:
    with Checkpoints(folder / CHECKPOINTS, keep=1) as checkpoints:
        checkpoints.save(step, *trainer.saved())


def test_checkpoint_is_an_actor_with_merged_weights(steps: Any, tmp_path: Path) -> None:
    trainer, _, _ = steps
    saved(trainer, tmp_path, 1)
    source = Source(trainer.arch, byte_tokenizer(), random_tensors(trainer.arch, 0), "micro")
    actor = Actor(source, tmp_path, 1, learner=LEARNER)
    mesh = sharding.make_mesh(MeshConfig())
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), actor.params(mesh),
                 trainer.published)
    other = Source(trainer.arch, byte_tokenizer(), random_tensors(trainer.arch, 1), "other")
    with pytest.raises(ConfigError, match="model.path = 'other': its weights are not the ones"):
        Actor(other, tmp_path, 1, learner=LEARNER).params(mesh)


@pytest.mark.ci
def test_run_goes_on_from_adapters_beside_the_same_base(tmp_path: Path) -> None:
    config = micro_config(learner=LEARNER, rl=RLConfig(kl=0.1, minibatches=2),
                          reward=RewardConfig(terms=("helpers:even",)))
    trainer = stepping(config)
    trainer.step()
    saved(trainer, tmp_path, 1)
    again = stepping_to_compile(config)
    with Checkpoints(tmp_path / CHECKPOINTS, keep=1) as checkpoints:
        initial, again.state = again.state, restore(again.trainer, again.state, checkpoints)
        jax.tree.map(np.testing.assert_array_equal, again.published, trainer.published)
        frozen = again.policy.frozen
        again.policy.frozen = frozen._replace(identities={"base": "float32 other"})
        with pytest.raises(ConfigError, match="model.path.* its weights are not the ones"):
            restore(again.trainer, initial, checkpoints)
    again.policy.frozen = frozen
    left, right = trainer.step()[0], again.step()[0]
    kept = [name for name in left if not name.startswith(("time/", "memory/", "learn/", "rollout"))
            and name != "compilations"]
    assert {name: left[name] for name in kept} == {name: right[name] for name in kept}
    assert left["kl/reference"] > 0


@pytest.mark.ci
def test_kl_of_adapters_in_the_reward_is_that_to_the_base() -> None:
    """In two minibatches; k1 is the mean log-ratio, and the rollout's own log-probs are its half.
    """
    trainer = stepping(micro_config(
        learner=LEARNER, reward=RewardConfig(terms=("helpers:even",)),
        rl=RLConfig(kl=0.5, kl_in="reward", kl_estimator="k1", minibatches=2)))
    first, _ = trainer.step()
    assert first["kl/reference"] == 0 and first["policy/ratio_max"] > 1  # of the second update
    rollout, _ = trainer.rollout()
    width = rollout.prompt.shape[1] + rollout.tokens.shape[1]
    ends = rollout.prompt_length + rollout.length
    tokens, at = np.zeros((len(ends), width), np.int32), np.arange(width)
    for row, prompt, start, said, end in zip(tokens, rollout.prompt, rollout.prompt_length,
                                             rollout.tokens, ends, strict=True):
        row[:start], row[start:end] = prompt[:start], said[: end - start]
    logits = jax.jit(functools.partial(forward, trainer.arch))(
        jax.tree.map(jnp.asarray, trainer.policy.frozen.base), tokens, ends)
    logp = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits))[:, :-1], tokens[:, 1:, None],
                              2)[..., 0]
    mask = (at >= rollout.prompt_length[:, None]) & (at < ends[:, None])
    acted = rollout.raw_logprob[np.arange(rollout.tokens.shape[1]) < rollout.length[:, None]]
    want = (acted.sum() - logp[mask[:, 1:]].sum()) / mask.sum()
    second, _ = trainer.step()
    assert second["kl/reference"] == pytest.approx(want, abs=1e-4) and abs(want) > 1e-3
    assert second["applied"] == 1


@pytest.mark.ci
@pytest.mark.parametrize("fields", [dict(learner__packing="sequence"), dict(learner__remat="full"),
                                    dict(learner__optimizer_offload=True),
                                    dict(model__dtype="bfloat16"),
                                    dict(rl__updates=0)])
def test_options_of_the_learner_go_with_adapters(fields: dict[str, Any]) -> None:
    trainer = stepping(micro_config(learner=LEARNER, **fields))
    metrics, _ = trainer.step()
    assert metrics["applied"] == 1
    assert trainer.policy.frozen.base["layers"][0]["qkv"].dtype == trainer.config.model.dtype
    assert trainer.policy.frozen.base["final_norm"].dtype == jnp.float32


@pytest.mark.ci
def test_adapters_on_a_mesh_learn_what_one_device_does() -> None:
    actual = []
    for mesh in (MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)):
        trainer = stepping(micro_config(learner=LEARNER, mesh=mesh))
        rollout, _ = trainer.rollout()
        trainer.learn(rollout, advantages(trainer.config))
        actual.append((rollout.tokens, jax.tree.map(np.asarray, trainer.params)))
    np.testing.assert_array_equal(actual[0][0], actual[1][0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), actual[0][1],
                 actual[1][1])
    gate = trainer.params["layers"][0]["gate_proj"]
    assert gate["a"].sharding.spec[1] == "fsdp" and gate["b"].sharding.spec[0] == "tensor"
