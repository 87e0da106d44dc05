"""A mesh changes where things lie, not what is computed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Stepping,
    ask,
    make_engine,
    make_task,
    micro_config,
    moments,
    roll_out,
    run_training,
    stepping,
    streams,
    tiny_arch,
    tiny_params,
)
from pairs import run_two

from specrl_jax import sharding
from specrl_jax.config import ConfigError, MeshConfig, RolloutConfig
from specrl_jax.control import fixed, protocol
from specrl_jax.draft.draft_model import draft_model
from specrl_jax.metrics.run_files import read_metrics, read_samples
from specrl_jax.model import architecture
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.sampler import publisher
from specrl_jax.structs import Rollout

ADVANTAGE = np.random.default_rng(0).normal(size=16).astype(np.float32)
MESHES = {"2x2x2": MeshConfig(2, 2, 2), "8x1x1": MeshConfig(8, 1, 1), "1x8x1": MeshConfig(1, 8, 1),
          "1x1x8": MeshConfig(1, 1, 8)}
needs_8 = pytest.mark.skipif(jax.device_count() < 8, reason="see XLA_FLAGS in tests/conftest.py")


@pytest.fixture(scope="module")
def single() -> tuple[Rollout, Any, Any]:
    """The first rollout, the gradient of one update from it, and the second rollout; one device."""
    trainer = stepping(micro_config())
    rollout, _ = trainer.rollout()
    trainer.learn(rollout, ADVANTAGE)
    return rollout, jax.tree.map(np.asarray, moments(trainer.state.learner.optimizer)), trainer.mesh


@needs_8
@pytest.mark.ci
@pytest.mark.parametrize("mesh", [
    mesh if mesh == "2x2x2" else pytest.param(mesh, marks=pytest.mark.full) for mesh in MESHES])
def test_tokens_and_gradients_are_those_of_one_device(single: Any, mesh: str) -> None:
    want, gradient, alone = single
    assert alone.size == 1
    trainer = stepping(micro_config(mesh=MESHES[mesh]))
    assert trainer.mesh.size == 8
    for params, rules in ((trainer.params, sharding.LEARNER_RULES),
                          (moments(trainer.state.learner.optimizer), sharding.MOMENT_RULES),
                          (trainer.published, sharding.ROLLOUT_RULES)):
        assert_lie_where_declared(trainer, params, rules)
    rollout, _ = trainer.rollout()
    for name in ("tokens", "length", "prompt", "prompt_id", "sample_id", "stopped"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(want, name), err_msg=name)
    for name in ("logprob", "raw_logprob", "top_p_mass"):
        np.testing.assert_allclose(getattr(rollout, name), getattr(want, name), atol=1e-4)
    trainer.learn(want, ADVANTAGE)
    actual = moments(trainer.state.learner.optimizer)
    for got, alone in zip(*map(jax.tree.leaves, (actual, gradient)), strict=True):
        assert np.linalg.norm(np.asarray(got) - alone) <= 1e-5 * np.linalg.norm(alone)
    assert_lie_where_declared(trainer, trainer.params, sharding.LEARNER_RULES)
    assert_lie_where_declared(trainer, trainer.published, sharding.ROLLOUT_RULES)


def assert_lie_where_declared(trainer: Stepping, params: Any, rules: Any) -> None:
    """Every device holds the part of every leaf that the description and the mesh give."""
    described = jax.tree.leaves(architecture.describe(trainer.arch), is_leaf=architecture.is_param)
    split = 0
    for leaf, param in zip(jax.tree.leaves(params), described, strict=True):
        want = [size // devices(trainer, rules[axis]) if axis in rules else size
                for size, axis in zip(param.shape, param.axes, strict=True)]
        assert len(leaf.addressable_shards) == 8
        assert {shard.data.shape for shard in leaf.addressable_shards} == {tuple(want)}
        split += tuple(want) != param.shape
    assert split > 0 or all(devices(trainer, axes) == 1 for axes in rules.values())


def devices(trainer: Stepping, axes: str | tuple[str, ...]) -> int:
    names = (axes,) if isinstance(axes, str) else axes
    return int(np.prod([trainer.mesh.shape[name] for name in names]))


@needs_8
@pytest.mark.ci
def test_mesh_chooses_prompts_and_baselines_as_one_device_does() -> None:
    actual = []
    for mesh in (MeshConfig(), MeshConfig(data=2, tensor=2)):
        trainer = stepping(micro_config(
            mesh=mesh, reward__terms=("rewards:starts_even",), rl__filter="dynamic",
            rl__curriculum="pass_rate", rl__advantage="greedy_baseline", rl__loss="reinforce"))
        steps = [trainer.step() for _ in range(2)]
        assert trainer.mesh.size == mesh.size and all(m["applied"] for m, _ in steps)
        actual.append([(m["rollout/batches"], m["reward/mean"], [
            (s["prompt_id"], s["sample_id"], s["tokens"], s["reward"]) for s in samples])
            for m, samples in steps])
    assert actual[0] == actual[1] and max(batches for batches, *_ in actual[0]) > 1


@pytest.mark.ci
def test_two_processes_write_what_one_does(tmp_path: Path) -> None:
    """Over loopback, two devices each; rows are refilled and compacted in every shard."""
    flags = ("--config.mesh.data=4", "--config.prompts_per_step=8", "--config.group_size=4",
             "--config.learner.micro_batch=32", "--config.rollout.batch_size=16",
             "--config.steps=2", "--config.eval.every=2", "--config.eval.examples=6",
             "--config.reward.terms=('digit_fraction','rewards:distinct')",
             "--config.reward.weights=(1.0,0.5)")
    run_two(tmp_path / "two", *flags, devices=2)
    run_training(tmp_path / "one", *flags, devices=4)
    one, two = (list(read_samples(tmp_path / name)) for name in ("one", "two"))
    assert len(one) == 64 and one == two
    for alone, joint in zip(*(read_metrics(tmp_path / n) for n in ("one", "two")), strict=True):
        assert alone.keys() == joint.keys() and joint["compilations"] == 0
        for name in alone:
            if not name.startswith(("time/", "memory/")) and "per_second" not in name:
                told, wanted = (jax.tree.leaves(row[name]) for row in (joint, alone))
                assert told == pytest.approx(wanted, rel=1e-4, abs=1e-5), name
    assert alone["rollout/launches"] > 2 and alone["rollout/occupancy"] > 0.5
    assert "eval/accuracy" in alone and (tmp_path / "two" / "best.json").exists()


@pytest.mark.ci
@needs_8
@pytest.mark.parametrize("rule", [
    "match", pytest.param("rejection", marks=pytest.mark.full)])
def test_shards_that_differ_in_truncation_do_not_deadlock(rule: str) -> None:
    """Collectives over `tensor` in a branch that only some data shards take would never end."""
    arch, task = tiny_arch(num_layers=1), make_task(prompts=2, group=4, stop=(-1,))
    truncates = np.arange(task.sequences) < task.sequences // 2
    asked = ask(task, 3, top_p=np.where(truncates, 0.5, 1.0))

    def rolled_out(config: MeshConfig) -> Result:
        mesh, drafter = mesh_of(config), draft_model(arch, depth=2, branch=2, nodes=4)
        engine = make_engine(arch, task, mesh=mesh, rule=rule, max_packed=16, drafter=drafter,
                             controller=fixed.fixed(), truncates=True)
        params = publisher(arch, mesh, jnp.float32, False)(tiny_params(arch))
        own = drafter.bind(params, tiny_params(arch))
        engine.compile(params, own)
        return roll_out(engine, params, asked, own, control=protocol.make_spec(2, 2, 4, 0))

    split = rolled_out(MeshConfig(data=2, tensor=2))
    assert split.counters["accepted"] > 0
    kept = np.asarray(split.sequences.top_p_mass)
    assert (kept[truncates] < 0.99).any() and (kept[~truncates] == 1).all()
    if rule == "match":  # else tokens depend on trees, and those on what all rows have taught
        assert streams(split) == streams(rolled_out(MeshConfig()))


def mesh_of(config: MeshConfig) -> Any:
    return sharding.make_mesh(config)


@pytest.mark.parametrize("make, words", [
    (lambda: mesh_of(MeshConfig(3, 400, 1)), "3x400x1"),
    (lambda: micro_config(mesh=MeshConfig(8, 1, 1), rollout=RolloutConfig(batch_size=12)),
     "rollout.batch_size = 12"),
    (lambda: micro_config(mesh=MeshConfig(4, 1, 1), prompts_per_step=6), "prompts_per_step = 6")])
def test_mesh_that_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
    with jax.enable_x64(True), pytest.raises(ConfigError, match="JAX_ENABLE_X64 = True: .*unset"):
        mesh_of(MeshConfig())


@needs_8
def test_what_does_not_divide_is_replicated_and_reported() -> None:
    mesh = mesh_of(MeshConfig(1, 1, 8))
    arch = architecture.Architecture(vocab_size=20, hidden_size=16, intermediate_size=16,
                                     num_layers=1, num_heads=3, num_kv_heads=3, head_dim=4)
    described = architecture.describe(arch)
    placed = sharding.shardings(described, sharding.LEARNER_RULES, mesh)
    layer = placed["layers"][0]
    assert placed["embed"].is_fully_replicated and layer["qkv"].is_fully_replicated
    assert not layer["down"].is_fully_replicated
    replicated = sharding.replicated_axes(described, sharding.LEARNER_RULES, mesh)
    assert replicated == {"vocab = 20 over tensor = 8", "kv_heads = 3 over tensor = 8"}


@pytest.mark.parametrize("error", [
    AssertionError(), RuntimeError("Unable to initialize backend 'cuda':\nno such device")])
def test_missing_device_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(sharding.jax, "devices", fail)
    with pytest.raises(ConfigError, match="JAX_PLATFORMS = .*: JAX finds no such") as refused:
        mesh_of(MeshConfig())
    assert "\n" not in str(refused.value)
