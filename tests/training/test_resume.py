"""Runs that are killed and resumed, refused, or speculate differently, end in the same files."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import kills
import numpy as np
import pytest
from helpers import HANGS, kill_when, run_training, start_training
from same_runs import assert_same_runs

from specrl_jax.checkpoint.checkpoints import list_steps, restore_part
from specrl_jax.checkpoint.steps import PARTIAL
from specrl_jax.config import Config, ConfigError, as_dict, build
from specrl_jax.metrics.run_files import read_metrics, read_samples
from specrl_jax.runtime.workdir import write_config
from specrl_jax.training.run import train

STEPS, EVERY, KILLS = 26, 2, 10
LONG = (f"--config.steps={STEPS}", f"--config.checkpoint_every={EVERY}")


def frozen(folder: Path) -> tuple[str, ...]:
    """A run that chooses by a table of costs, which it may not correct."""
    return (*LONG, "--config.control.policy=budget", "--config.control.cost_updates=off",
            f"--config.control.cost_table={folder / 'cost.json'}")


def lines(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saving(workdir: Path) -> list[str]:
    """Checkpoints that are being written."""
    folder = workdir / "checkpoints"
    return [x for x in (os.listdir(folder) if folder.exists() else []) if not x.isdecimal()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Path:
    """A run that was never killed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    run_training(workdir, *frozen(workdir.parent))
    return workdir


@pytest.mark.full
def test_a_run_killed_at_random_moments_equals_one_that_was_not(
        whole: Path, tmp_path: Path) -> None:
    rng, workdir = random.Random(0), tmp_path / "run"
    step = sorted(m["time/step"] for m in read_metrics(whole))[STEPS // 2]
    for kill in range(KILLS):
        goal = lines(workdir) - lines(workdir) % EVERY + EVERY
        process = start_training(workdir, *frozen(whole.parent))
        try:
            while lines(workdir) < goal and process.poll() is None:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 2 * step))
        finally:
            process.send_signal(signal.SIGKILL)
            _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"ended before kill {kill}: {err}"
    run_training(workdir, *frozen(whole.parent))
    assert_same_runs(whole, workdir, STEPS)


def kill_in_save(workdir: Path, place: str, count: int, *flags: str) -> list[int]:
    """A run that dies there, see kills.py; the complete checkpoints after it."""
    process = start_training(workdir, *flags, by=(str(Path(kills.__file__)), place, str(count)))
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 9, err
    return list_steps(workdir / "checkpoints")


@pytest.mark.ci
def test_a_run_killed_inside_a_save_equals_one_that_was_not(whole: Path, tmp_path: Path) -> None:
    """Before the commit file of checkpoint 4, after it, and while 2 is removed for 6."""
    workdir = tmp_path / "run"
    for place, left in ((f"/4{PARTIAL}/commit_success.txt", [2]),
                        (f"os.rename .*/4{PARTIAL} ", [2]), (f"rmtree .*/2{PARTIAL}", [4, 6])):
        assert kill_in_save(workdir, place, 1, *frozen(whole.parent)) == left
        assert saving(workdir)
    run_training(workdir, *frozen(whole.parent))
    assert saving(workdir) == []
    assert_same_runs(whole, workdir, STEPS)


@pytest.mark.full
def test_a_run_killed_anywhere_in_saves_equals_one_that_was_not(
        whole: Path, tmp_path: Path) -> None:
    rng, workdir = random.Random(0), tmp_path / "run"
    for _ in range(2 * KILLS):
        kill_in_save(workdir, "/checkpoints/.+", rng.randrange(10, 50), *frozen(whole.parent))
    run_training(workdir, *frozen(whole.parent))
    assert saving(workdir) == []
    assert_same_runs(whole, workdir, STEPS)


LEARNERS = {
    "muon": ("--config.learner.optimizer=muon", "--config.learner.schedule=cosine",
             "--config.learner.decay_steps=5"),
    "adapters and evaluation": (
        "--config.learner.lora_rank=4", "--config.learner.learning_rate=0.1",
        "--config.reward.terms=('rewards:starts_even',)", "--config.eval.every=2",
        "--config.eval.examples=8", "--config.eval.samples=2", "--config.eval.temperature=1.0",
        "--config.eval.reward=rewards:starts_even", "--config.checkpoint_keep=1")}


@pytest.mark.ci
@pytest.mark.parametrize("learner", LEARNERS)
def test_a_killed_run_that_chooses_prompts_goes_on_the_same(tmp_path: Path, learner: str) -> None:
    flags = ("--config.steps=6", "--config.checkpoint_every=2", "--config.control.policy=fixed",
             "--config.rl.filter=dynamic", "--config.rl.curriculum=pass_rate", *LEARNERS[learner])
    run_training(tmp_path / "whole", *flags)
    killed = tmp_path / "killed"

    def is_killed() -> bool:
        """On a busy machine a run may end before."""
        shutil.rmtree(killed, ignore_errors=True)
        return kill_when(start_training(killed, *flags), lambda: lines(killed) >= 3) and (
            lines(killed) < 6)

    assert any(is_killed() for _ in range(5))
    run_training(killed, *flags)
    assert_same_runs(tmp_path / "whole", tmp_path / "killed", 6)
    batches = [m["rollout/batches"] for m in read_metrics(tmp_path / "whole")]
    each = json.loads((tmp_path / "whole" / "config.json").read_text())["prompts_per_step"]
    prompts = [restore_part(tmp_path / name / "checkpoints", 6, "prompts")
               for name in ("whole", "killed")]
    jax.tree.map(np.testing.assert_array_equal, *prompts)
    assert prompts[0]["drawn"] == prompts[0]["tried"].sum() == each * sum(batches) > each * 6
    if "evaluation" in learner:
        best, same = ((tmp_path / name / "best.json").read_text() for name in ("whole", "killed"))
        assert best == same
        kept = [list_steps(tmp_path / name / "checkpoints") for name in ("whole", "killed")]
        assert kept[0] == kept[1] == sorted({json.loads(best)["step"], 6})


@pytest.mark.ci
@pytest.mark.parametrize("damaged", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_with_damaged_checkpoints_ends_as_if_they_were_not(
        whole: Path, tmp_path: Path, damaged: int) -> None:
    """Of two: with the newest damaged it goes on from the other, with both from step 0."""
    workdir = shutil.copytree(whole, tmp_path / "run")
    folder = workdir / "checkpoints"
    steps = list_steps(folder)
    for step in steps[-damaged:]:
        (folder / str(step) / "meta" / "metadata").write_bytes(b"{}")
    process = start_training(workdir, *frozen(whole.parent))
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    loud = [line for line in err.splitlines() if line.startswith("WARNING: checkpoint")]
    assert len(loud) == damaged and "is damaged" in loud[0]
    assert (f"falling back to checkpoint {steps[-2]}" in loud[0]) and len(steps) == 2
    assert ("restarting at step 0" in loud[-1]) == (damaged == 2)
    assert (f"resuming {workdir} after step {steps[-2]}" in err) == (damaged == 1)
    assert_same_runs(whole, workdir, STEPS)


@pytest.mark.ci
@pytest.mark.parametrize("number", [
    signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_run_that_is_stopped_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    workdir = tmp_path / "run"
    process = start_training(workdir, "--config.steps=100000", f"--config.checkpoint_every={EVERY}")
    try:
        while lines(workdir) <= EVERY and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    newest = list_steps(workdir / "checkpoints")[-1]
    assert process.returncode == 130 and "Traceback" not in err
    assert err.endswith(f"stopped; checkpoint {newest} is good: run the same command again to "
                        "go on\n")
    assert restore_part(workdir / "checkpoints", newest, "actor")


@pytest.mark.ci
def test_a_complete_run_is_left_alone(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.jsonl")}
    assert "complete" in run_training(whole, *frozen(whole.parent))
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*.jsonl")} == before


def without_commits(workdir: Path) -> list[str]:
    return [json.dumps({k: v for k, v in sample.items() if k != "commits"})
            for sample in read_samples(workdir)]


@pytest.mark.full
def test_speculation_and_batch_change_no_line_but_the_commits(tmp_path: Path) -> None:
    variants = {
        "history": (), "off": ("--config.spec.drafter=off",),
        "eagle": ("--config.spec.drafter=eagle", "--config.control.min_survival=0.0"),
        "merge": ("--config.spec.drafter=merge", "--config.spec.max_nodes=5",
                  "--config.spec.nodes=5", "--config.control.min_survival=0.0"),
        "plain": ("--config.control.policy=off",),
        "batch": ("--config.rollout.batch_size=8", "--config.rollout.rounds_per_launch=3")}
    for name, flags in variants.items():
        run_training(tmp_path / name, "--config.steps=5", "--config.spec.history_past=4", *flags)
    want = without_commits(tmp_path / "history")
    assert len(want) == 5 * 8
    for name in variants:
        assert without_commits(tmp_path / name) == want, name
    losses = [[m["loss"] for m in read_metrics(tmp_path / name)] for name in variants]
    assert all(other == losses[0] for other in losses)
    length = {name: [m["rollout/accept_length"] for m in read_metrics(tmp_path / name)]
              for name in variants}
    assert length["off"] == length["plain"] == [1.0] * 5 and max(length["history"]) > 1
    for name, parts in (("eagle", ("eagle",)), ("merge", ("eagle", "history"))):
        told = read_metrics(tmp_path / name)
        assert all(sum(m[f"draft/{part}/drafted"] for m in told) > 0 for part in parts), name
        shares = [[m[f"draft/{part}/drafted_share"] for part in parts] for m in told]
        np.testing.assert_allclose(np.sum(shares, 1), [m["rollout/drafted"] > 0 for m in told])


@pytest.mark.ci
@pytest.mark.parametrize("flag, message", [
    ("--config.stepz=3", "stepz"), ("--config.spec.drafter=oracle", "spec.drafter = 'oracle'"),
    ("--config.mesh.data=4", "mesh = '4x1x1'")])
def test_bad_input_ends_in_one_line_and_touches_nothing(
        flag: str, message: str, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    process = start_training(workdir, flag)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode != 0
    said = err.strip().splitlines()
    assert [line for line in said if line.startswith("error:")] == said[-1:]
    assert message in said[-1] and "Traceback" not in err
    assert not workdir.exists()


def config(**changes: Any) -> dict[str, Any]:
    """The tiny preset as a dict; `rollout__top_k=9` sets a field of a section."""
    values = as_dict(Config(
        name="tiny", prompts_per_step=4, group_size=2))
    values["model"]["path"] = "random:tiny"
    values["rollout"] |= {"batch_size": 4, "max_prompt_tokens": 128, "max_new_tokens": 6}
    values["learner"]["micro_batch"] = 8
    values["data"] |= {"level": "add2", "examples": 8}
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        (values[section] if section else values)[field] = value
    return values


@pytest.mark.parametrize("field,value", [
    ("group_size", 1), ("steps", "many"), ("stepz", 3), ("model__path", "no/such/place"),
    ("model__path", "."), ("mesh__data", 16),
    ("rollout__max_prompt_tokens", 20), ("reward__terms", ("nice",)), ("data__name", "mnist"),
    ("data__level", "hard"), ("spec__drafter", "oracle"), ("mesh__data", 3),
    ("rollout__max_new_tokens", 5000), ("rollout__temperature", float("inf")),
    ("learner__learning_rate", float("inf")), ("reward__weights", (float("inf"),)),
    ("steps", 0)])
def test_bad_values_are_refused_before_anything_is_written(
        field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        train(build(Config, config(**{field: value})), tmp_path / "run")
    assert "\n" not in str(refused.value) and field.split("__")[-1] in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field,value", [
    ("seed", 1), ("learner__learning_rate", 0.5), ("rollout__max_new_tokens", 5),
    ("spec__rule", "rejection"), ("rollout__temperature", 0.5)])
def test_a_workdir_of_another_run_is_refused_and_left_alone(
        field: str, value: Any, tmp_path: Path) -> None:
    write_config(tmp_path, config())
    stored = (tmp_path / "config.json").read_text()
    with pytest.raises(ConfigError, match=field.replace("__", ".")):
        train(build(Config, config(**{field: value})), tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]
    assert (tmp_path / "config.json").read_text() == stored
