"""A run goes on with other devices, memory and drafts, with the tokens that it would have had."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import ROOT, ends, micro_config, run_training, start_training, xla_flags
from pairs import run_two

from specrl_jax import sharding
from specrl_jax.config import ConfigError, LearnerConfig, MeshConfig, RolloutConfig
from specrl_jax.metrics.run_files import read_metrics, read_samples
from specrl_jax.model.export import export
from specrl_jax.model.source import fit_mesh
from specrl_jax.model.tiny import TINY, byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source

SIZES = ("--config.prompts_per_step=8", "--config.rollout.batch_size=8",
         "--config.learner.micro_batch=16", "--config.checkpoint_every=2",
         "--config.reward.terms=('digit_fraction',)", "--config.learner.learning_rate=1e-3")

LEARNS = ("--config.spec.drafter=eagle", "--config.distill.when=interval",
          "--config.distill.batch=8", "--config.distill.micro_batch=8")


@pytest.fixture(scope="module")
def invariant(tmp_path_factory: Any) -> tuple[str, ...]:
    """Flags of a run whose rollouts depend on no batch and no mesh, with heads that allow it."""
    arch = dataclasses.replace(TINY, num_heads=8, head_dim=16, num_layers=1)
    model = tmp_path_factory.mktemp("model") / "model"
    source = Source(arch, byte_tokenizer(), random_tensors(arch, 0), "random")
    export(model, arch, source.params(), source.tokenizer)
    return (*SIZES, f"--config.model.path={model}", "--config.model.numerics=invariant")


def tokens(run: Path) -> list[list[int]]:
    return [sample["tokens"] for sample in read_samples(run)]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> tuple[str, ...]:
    return (f"--config.mesh.data={data}", f"--config.mesh.fsdp={fsdp}",
            f"--config.mesh.tensor={tensor}")


def resume(run: Path, steps: int, *flags: str, devices: int = 1) -> str:
    """Goes on to `steps`; returns what it said."""
    process = start_training(run, f"--config.steps={steps}", *flags, devices=devices)
    told, = ends([process])
    assert process.returncode == 0, told
    return told


@pytest.mark.ci
def test_run_goes_on_on_any_mesh_with_the_same_tokens(
        tmp_path: Path, invariant: tuple[str, ...]) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_training(whole, *invariant, "--config.steps=8")
    resume(run, 2, *invariant)
    told = resume(run, 4, *invariant, *mesh(data=8), devices=8)
    assert "resuming with mesh.data = 8 (was 1): tokens stay equal" in told
    run_two(run, *invariant, "--config.steps=6", *mesh(data=2, fsdp=2), devices=2)
    resume(run, 8, *invariant)
    assert tokens(run) == tokens(whole) and len(tokens(run)) == 8 * 16
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3, abs=1e-6)


@pytest.mark.ci
def test_run_falls_back_to_fewer_devices_and_returns(
        tmp_path: Path, invariant: tuple[str, ...]) -> None:
    """The command stays the same; only the devices change."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_training(whole, *invariant, "--config.steps=6")
    flags = (*invariant, *mesh(data=8), "--config.mesh.fallback=('2x1x1','2x2x1')")
    told = [resume(run, steps, *flags, devices=n) for steps, n in ((2, 8), (4, 4), (6, 8))]
    line = "mesh: 4 devices are there, so 2x2x1 of mesh.fallback replaces 8x1x1"
    assert [line in text for text in told] == [False, True, False]
    assert "resuming with mesh.data = 2 (was 8), mesh.fsdp = 2 (was 1): tokens" in told[1]
    assert "resuming with mesh.data = 8 (was 2), mesh.fsdp = 1 (was 2): tokens" in told[2]
    assert tokens(run) == tokens(whole) and len(tokens(run)) == 6 * 16
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3, abs=1e-6)


def test_fallback_that_fits_no_number_of_devices_is_refused() -> None:
    config = MeshConfig(data=512, fallback=("256x1x1", "2x128x2"))
    with pytest.raises(ConfigError) as refused:
        sharding.choose_mesh(config)
    count = jax.device_count()
    assert str(refused.value) == (
        f"mesh.fallback = ('256x1x1', '2x128x2'): {count} devices are there, but 512x1x1 has 512, "
        f"256x1x1 has 256, 2x128x2 has 512; start as many, or add a mesh of {count} to "
        "mesh.fallback")
    assert sharding.choose_mesh(MeshConfig(data=512)).size == 512  # without fallbacks as it is


@pytest.mark.ci
@pytest.mark.parametrize("flags", [(), LEARNS], ids=["frozen", "drafter_learns"])
def test_run_goes_on_with_tensor_shards_and_back(tmp_path: Path, flags: Any) -> None:
    whole, run, sizes = tmp_path / "whole", tmp_path / "run", (*SIZES, *flags)
    run_training(whole, *sizes, "--config.steps=6")
    resume(run, 2, *sizes)
    resume(run, 4, *sizes, *mesh(2, 2, 2), devices=8)
    resume(run, 6, *sizes)
    assert tokens(run) == tokens(whole)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3, abs=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("flags", [
    ("--config.learner.micro_batch=8", "--config.learner.remat=full",
     "--config.learner.packing=sequence"),
    ("--config.rollout.batch_size=4", "--config.spec.drafter=eagle", "--config.spec.depth=1"),
    ("--config.control.policy=off", "--config.spec.history_past=2", "--config.distill.when=off")],
    ids=["learner", "drafter", "controller"])
def test_run_goes_on_with_less_memory_or_other_drafts(
        tmp_path: Path, invariant: tuple[str, ...], flags: Any) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_training(whole, *invariant, "--config.steps=4")
    resume(run, 2, *invariant)
    told = resume(run, 4, *invariant, *flags)
    assert all(flag.split("=")[0].removeprefix("--config.") in told for flag in flags[:2])
    assert tokens(run) == tokens(whole)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3, abs=1e-6)


@pytest.mark.ci
def test_run_on_another_day_tells_that_prompts_changed(tmp_path: Path) -> None:
    dated = dataclasses.replace(
        byte_tokenizer(), template="{{ strftime_now('%d') }} {{ messages[0]['content'] }}")
    source = Source(TINY, dated, random_tensors(TINY, 0), "random")
    export(tmp_path / "model", TINY, source.params(), dated)
    flags = (*SIZES, f"--config.model.path={tmp_path / 'model'}")
    first = resume(tmp_path / "run", 1, *flags, "--config.data.date=2026-01-30")
    told = resume(tmp_path / "run", 2, *flags, "--config.data.date=2026-01-31")
    assert "prompts otherwise" not in first and "first number 0: '31 " in told
    assert "prompts otherwise" not in resume(
        tmp_path / "run", 3, *flags, "--config.data.date=2026-01-30")


def test_fit_mesh_uses_one_device_where_there_are_too_few() -> None:
    told: list[str] = []
    for size, fitted in ((1, 1), (8, 8 if jax.device_count() >= 8 else 1), (512, 1)):
        config = micro_config(
            mesh=MeshConfig(data=size), prompts_per_step=size, learner=LearnerConfig(
                micro_batch=2 * size), rollout=RolloutConfig(batch_size=size))
        assert fit_mesh(config, told.append).mesh == MeshConfig(data=fitted)
    assert "the run's 512 devices are not here" in told[-1]


@pytest.mark.ci
def test_run_of_four_devices_is_read_on_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(run, *SIZES, "--config.steps=1", *mesh(data=2, fsdp=2), devices=4)
    environment = os.environ | {"XLA_FLAGS": xla_flags(1), "PYTHONPATH": os.pathsep.join(
        [str(ROOT), str(ROOT / "kernels")])}
    for script, *flags in (("export.py", f"--out={tmp_path / 'model'}"),
                           ("generate.py", "--prompt=hi"), ("eval.py", "--problems=2")):
        done = subprocess.run([sys.executable, ROOT / "experiments" / script, f"--run={run}",
                               *flags], text=True, capture_output=True, env=environment)
        assert done.returncode == 0 and "mesh: the run's 4 devices are not here" in done.stderr
    assert (tmp_path / "model" / "config.json").exists()
