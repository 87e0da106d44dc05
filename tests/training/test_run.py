"""The line that a run starts with."""

import dataclasses
import json
import re
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import HANGS

from specrl_jax.checkpoint import checkpoints
from specrl_jax.checkpoint.checkpoints import Checkpoints, list_steps
from specrl_jax.checkpoint.steps import finish_saves
from specrl_jax.config import ConfigError, load_config
from specrl_jax.config.tasks import RewardError
from specrl_jax.metrics import run_files
from specrl_jax.metrics.progress import Progress
from specrl_jax.model.tiny import TINY
from specrl_jax.runtime import lock
from specrl_jax.runtime.compilation import CompilationCounter
from specrl_jax.structs import ignore
from specrl_jax.training import run


def test_overview_names_work_time_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("tiny", steps=7)
    flops = 7 * run.step_flops(config, TINY)
    monkeypatch.setattr(run, "matmul_speed", lambda: flops / run.EFFICIENCY / 150)  # 2.5 minutes
    line = run.overview(config, TINY, Path("runs/x"))
    assert re.fullmatch(r"tiny: 7 RL steps of 8 prompts x 4 responses of up to 16 tokens; "
                        r"at most about 3 min after start-up; files in runs/x", line)


def test_step_flops_equal_a_hand_count() -> None:
    """32 sequences of 16 tokens; each row of 4 has one prompt of P tokens."""
    arch = dataclasses.replace(TINY, vocab_size=8, hidden_size=4, intermediate_size=2,
                               num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, tied=True)
    layer = 4 + 3 * 2 * 4 + 4 * 2 + 4 + 2 * 2 * 4 + 4 * 2
    parameters = 8 * 4 + 4 + layer
    config = load_config("tiny", rollout__max_prompt_tokens=10)
    assert config.sequences == 32 and config.sequences_per_row == 4
    learned = 32 * 16 + 8 * 10
    assert run.step_flops(config, arch) == parameters * (2 * 32 * 16 + 6 * learned)


def test_second_trainer_in_a_workdir_is_refused(tmp_path: Path) -> None:
    config = load_config("tiny", data__examples=8)
    with lock.hold(tmp_path):
        with pytest.raises(ConfigError, match="in use by .*, process [0-9]+; end that run"):
            run.train(config, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [lock.RUN_LOCK]


def saved(trainer: Any, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"actor": np.zeros(1)}, {}


def steps_of(workdir: Path, fails_at: int | None = None, evaluation: Any = None, every: int = 9,
             began: Callable[[int], None] = ignore) -> None:
    """Runs four steps of a trainer that computes nothing; its reward fails at a step."""
    def step(state: Any, *_: object) -> tuple[Any, dict[str, float], list[Any]]:
        began(state.step)
        if state.step == fails_at:
            raise RewardError("reward 'x', example 3, answer 'y': judge is down")
        return (types.SimpleNamespace(step=state.step + 1, bad_steps=0, best=None),
                {"step": state.step, "applied": 1, "time/step": 1}, [])

    trainer: Any = types.SimpleNamespace(
        config=load_config("tiny", steps=4, checkpoint_every=every), step=step)
    state: Any = types.SimpleNamespace(step=0, bad_steps=0, best=None)
    with Checkpoints(workdir / "checkpoints", 2) as kept, run_files.Writer(
            workdir, 0) as writer, Progress(4, 0) as progress:
        list(run.run_steps(run.Run(trainer, evaluation, kept, writer, progress,
                                   CompilationCounter()), state, {}))


def test_steps_go_on_while_a_checkpoint_is_written(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of step 2 ends within step 3, which ends it."""
    monkeypatch.setattr(run, "to_save", saved)
    write, opened = checkpoints.write_checksums, threading.Event()
    monkeypatch.setattr(checkpoints, "write_checksums",
                        lambda *args: opened.wait(HANGS) and write(*args))

    def began(step: int) -> None:
        if step == 3:
            assert list_steps(tmp_path / "checkpoints") == []
            opened.set()

    steps_of(tmp_path, every=2, began=began)
    assert list_steps(tmp_path / "checkpoints") == [2, 4]
    rows = run_files.read_metrics(tmp_path)
    assert ["time/save" in row for row in rows] == [False, False, True, False]
    assert rows[2]["memory/save_bytes"] == saved(None, None)[0]["actor"].nbytes


def test_a_full_disk_ends_a_run_before_its_next_step(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within step 3 the save of checkpoint 2 fails."""
    monkeypatch.setattr(run, "to_save", saved)
    full = threading.Event()

    def fail(*_: object) -> None:
        assert full.wait(HANGS)
        raise OSError(28, "No space left on device")

    def began(step: int) -> None:
        if step == 2:
            full.set()
            finish_saves()

    monkeypatch.setattr(checkpoints, "write_checksums", fail)
    with pytest.raises(checkpoints.CheckpointError, match="2: .*No space left.*: none"):
        steps_of(tmp_path, every=2, began=began)
    assert len(run_files.read_metrics(tmp_path)) == 3


def test_best_is_named_before_the_checkpoint_of_the_last_best_is_removed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "to_save", lambda trainer, state: (
        {"actor": np.zeros(1)}, {"best": state.best}))
    remove, seen = checkpoints.remove, []

    def removed(step_dir: Path) -> None:
        best = json.loads((tmp_path / "best.json").read_text())
        seen.append((step_dir.name, best["step"], list_steps(tmp_path / "checkpoints")))
        remove(step_dir)

    def after(state: Any, progress: Progress) -> tuple[Any, dict[str, float]]:
        state.best = {"step": 1 if state.step < 4 else 4}
        return state, {}

    monkeypatch.setattr(checkpoints, "remove", removed)
    steps_of(tmp_path, evaluation=types.SimpleNamespace(after=after), every=1)
    assert seen == [("1", 4, [1, 2, 3, 4]), ("2", 4, [2, 3, 4])]


@pytest.mark.parametrize("complete, kept", [
    (0, "no step was complete, so none is saved"), (2, "checkpoint 2 is saved")])
def test_reward_failure_says_what_is_saved(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: int, kept: str) -> None:
    """Whether in a rollout of RL or, at step 0, in one for a drafter that learns once."""
    monkeypatch.setattr(run, "to_save", saved)
    with pytest.raises(RewardError, match=f"^reward 'x', .* judge is down; {kept}: correct the "
                       "reward and run the same command again, or go on with reward.on_failure=0, "
                       "which must then stay in the command$"):
        steps_of(tmp_path, complete)
    assert list_steps(tmp_path / "checkpoints") == [2][: complete]


def test_evaluation_whose_reward_fails_keeps_its_step(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have failed in another process, whose save needs this one."""
    monkeypatch.setattr(run, "to_save", saved)

    def after(state: Any, progress: Progress) -> tuple[Any, dict[str, float]]:
        if state.step == 3:
            raise RewardError("process 1: reward 'x', example 3, answer 'y': judge is down")
        return state, {}

    with pytest.raises(RewardError, match="^process 1: .* judge is down; checkpoint 3 is saved"):
        steps_of(tmp_path, evaluation=types.SimpleNamespace(after=after))
    assert list_steps(tmp_path / "checkpoints") == [3]
    assert [row["step"] for row in run_files.read_metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("field, part", [
    ("model.path", "weights"), ("data.name", "training examples"), ("rl.teacher", "tokenizer"),
    ("draft.path", "model.safetensors"), ("eval.split", "held-out examples")])
def test_files_that_differ_between_processes_are_refused_first(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, part: str) -> None:
    """Before a model is loaded by all of them, or anything written."""
    (tmp_path / "model.safetensors").write_bytes(b"a head")
    config = load_config("tiny", data__examples=8, draft__path=str(tmp_path),
                         rl__teacher="random:tiny", eval__every=1)
    held_out = types.SimpleNamespace(examples=[{"id": 0}])
    made: list[str] = []

    def share(name: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        if name != "the files":
            return [mine, mine]
        return [mine, mine | dict.fromkeys(mine.keys() & {f"{field} {part}"}, "another")]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(run.resume.processes, "share", share)
    monkeypatch.setattr(run.Trainer, "create", lambda *_: (made.append("trainer"), None))
    monkeypatch.setattr(run, "InRun", lambda *_: types.SimpleNamespace(
        problems=types.SimpleNamespace(prompts=held_out)))
    with pytest.raises(ConfigError, match=rf"^{field} = .*: process 1 has different .*\({part}\)"):
        run.train(config, tmp_path / "run")
    assert made == ["trainer"] * (field == "eval.split") and not (tmp_path / "run").exists()


def test_profile_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "profile").touch()
    with pytest.raises(ConfigError, match="--profile = .*/profile is not a directory"):
        run.train(load_config("tiny"), tmp_path, profile=1)
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


@pytest.mark.parametrize("total, count, traced", [(5, 2, 2), (3, 4, 2), (1, 1, 0), (3, 0, 0)])
def test_profile_traces_the_steps_after_the_first(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, count: int, traced: int
        ) -> None:
    events: list[object] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: events.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))

    def steps():
        for number in range(total):
            yield
            events.append(number)

    assert sum(1 for _ in run.profiled(steps(), tmp_path, count)) == total
    started = [str(tmp_path)] if traced else []
    stopped = ["stop"] if traced else []
    rest = list(range(1, total))
    assert events == [0, *started, *rest[:traced], *stopped, *rest[traced:]]
