"""sft.py: killed and resumed it ends the same, and RL starts from what it writes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import (
    HANGS,
    ROOT,
    SMALL,
    kill_when,
    repeatable_metrics,
    run_training,
    script_environment,
)

from specrl_jax.checkpoint.checkpoints import list_steps, restore_part
from specrl_jax.metrics.run_files import read_metrics
from specrl_jax.runtime.workdir import write_config

STEPS = 8


def start(workdir: Path, *flags: str) -> subprocess.Popen:
    chats = [{"prompt": f"What is {i} + 1?", "completion": f"{i + 1}"} for i in range(12)]
    data = workdir.parent / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats))
    command = [sys.executable, str(ROOT / "experiments" / "sft.py"), *SMALL, f"--workdir={workdir}",
               f"--config.data.path={data}", f"--heldout={data}", f"--config.steps={STEPS}",
               "--config.checkpoint_every=2", "--config.rollout.max_prompt_tokens=80", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=script_environment() | {"JAX_PLATFORMS": "cpu"}, cwd=workdir.parent)


def finish(workdir: Path, *flags: str) -> str:
    process = start(workdir, *flags)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    return out


@pytest.mark.ci
def test_killed_fine_tuning_ends_as_a_whole_one_and_starts_rl(
        tmp_path: Path, command: Callable[..., subprocess.CompletedProcess]) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert "model" in finish(whole)
    assert kill_when(start(killed), lambda: list_steps(killed / "checkpoints"))
    finish(killed)
    assert repeatable_metrics(whole) == repeatable_metrics(killed)
    for key in ("actor", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, *(
            restore_part(run / "checkpoints", STEPS, key) for run in (whole, killed)))
    rows = read_metrics(killed)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [bool("heldout/loss" in row) for row in rows] == [False, True] * (STEPS // 2)
    assert rows[-1]["heldout/loss"] < rows[1]["heldout/loss"]
    assert all(row["learn/tokens_per_second"] > 0 for row in rows)
    assert "chats" not in (killed / "config.json").read_text(), "eval.py asks the preset's task"
    evaluated = command("eval.py", f"--run={killed}", "--problems=2")
    assert evaluated.returncode == 0 and "2 of specrl_arithmetic add2" in evaluated.stdout
    run_training(tmp_path / "rl", f"--config.model.path={killed / 'model'}", "--config.steps=1")
    assert len(read_metrics(tmp_path / "rl")) == 1


@pytest.mark.ci
def test_chats_of_another_file_are_refused(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    finish(workdir, "--config.steps=2", "--config.learner.lora_rank=2")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a", "completion": "b"}\n')
    for rank, flags, reason in (
            (2, (f"--config.data.path={other}",), "the training examples are not those"),
            (2, (f"--heldout={other}",), "the --heldout examples are not those"),
            (4, (), "learner.lora_rank = 4, but the run in")):
        process = start(workdir, f"--config.learner.lora_rank={rank}", *flags)
        _, err = process.communicate(timeout=HANGS)
        assert process.returncode == 2 and reason in err


def test_own_result_as_the_start_is_refused(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    (workdir / "model").mkdir(parents=True)
    write_config(workdir, {})
    process = start(workdir, f"--config.model.path={workdir}/../run/model")
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 2 and "run/model': is what this run writes; give the model" in err
    assert len(err.splitlines()) == 1 and list((workdir / "model").iterdir()) == []
