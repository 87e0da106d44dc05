"""The staleness experiment: how arms are compared, what is kept, and what is refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import HANGS, ROOT, script_environment

from experiments.studies import staleness_account, staleness_arms, subprocess_runner
from specrl_jax.config import Config, ConfigError, load_config
from specrl_jax.metrics.run_files import Writer

CONFIG = load_config("staleness")


def arm(workdir: Path, seconds: float, token: int = 5, **metrics: Any) -> Path:
    """A run of 8 steps."""
    with Writer(workdir, 0) as writer:
        for step in range(8):
            summary = {"step": step, "time/rollout": seconds, "time/step": 2.0, "reward/mean": 0.5,
                    "rollout/accept_length": 1.0} | metrics
            writer.write_step(summary, [{"tokens": [token, step], "reward": 0.5}])
    return workdir


@pytest.fixture
def arms(tmp_path: Path) -> tuple[Path, Path]:
    return (arm(tmp_path / "plain", 1.0),
            arm(tmp_path / "fast", 0.5, **{"rollout/accept_length": 2.5, "time/distill": 0.25,
                                           "distill/updates": 2, "drafter/faults": 1}))


@pytest.fixture
def case(arms: Any) -> dict[str, Any]:
    plain = staleness_account.account(arms[0], CONFIG, None)
    return {"plain": plain, "fast": staleness_account.account(arms[1], CONFIG, plain)}


def test_account_saved_and_spent_seconds_add_up(case: Any) -> None:
    fast = case["fast"]
    assert fast["saved_seconds"] == [0.5] * 8 and fast["spent_seconds"] == [0.25] * 8
    assert fast["acceptance"] == [0.5] * 8 and fast["faults"] == 1 and fast["tokens_equal"]
    summary = staleness_account.summarize({"0": case, "1": case}, "plain")
    assert summary["fast"]["net_seconds"] == [2.0, 2.0, 2.0]
    assert summary["plain"]["net_seconds"][0] == 0
    assert summary["fast"]["acceptance_end"] == [0.5] * 3


def test_numbers_at_equal_seconds_cut_slow_arms(case: Any) -> None:
    case["fast"] |= {"acceptance": [0.0, 0.2, 0.4, 0.6, 0.9, 0.9, 0.9, 0.9], "seconds": [4.0] * 8}
    summary = staleness_account.numbers(case)["fast"]
    assert summary["acceptance_at_equal_seconds"] == 0.6
    assert summary["ahead_seconds"] == -16 and summary["net_seconds"] == 2  # rollouts alone


def test_summary_differences_are_paired_by_seed(case: Any) -> None:
    """Seeds differ by far more than arms do, and arms by the same in each."""
    cases = {str(seed): {name: one | {"reward": [seed + (name == "fast") / 8] * 8}
                         for name, one in case.items()} for seed in range(5)}
    summary = staleness_account.summarize(cases, "plain")["fast"]
    low, high = summary["reward_end"][1:]
    assert high - low > 3 and summary["seeds"] == 5
    assert summary["over_plain"]["reward_end"] == pytest.approx([0.125] * 3)
    assert summary["reward_distance"] == pytest.approx([0.125] * 3)


def test_account_unequal_token_fails_only_where_exact(
        case: Any, tmp_path: Path) -> None:
    other = arm(tmp_path / "other", 1.0, token=6)
    with pytest.raises(ConfigError, match="its tokens are not those of"):
        staleness_account.account(other, CONFIG, case["plain"])
    lawful = staleness_arms.configs(CONFIG, "bugs", "")["rejection"]
    assert not staleness_account.account(other, lawful, case["plain"])["tokens_equal"]


@pytest.mark.parametrize("flags, message", [
    (["--questions=why"], "--questions=why: choose some of modes, losses"),
    (["--arms=often"], "--arms=often: choose some of every_step, every_5"),
    (["--seeds=a"], "--seeds=a"),
    (["--questions=all", "--arms=once"], "--arms=once: belongs to one question"),
    (["--head=there", "--head_updates=5"], "--head_updates=5: --head is trained already"),
    (["--head=nowhere", "--arms=once"], "modes, arm frozen: draft.path = 'nowhere'"),
    (["--out=stale.json"], "it was made with another config"),
    (["--out=gone.json"], "it was made with another config"),
])
def test_bad_input_ends_in_one_line(command: Any, flags: list[str], message: str, tmp_path: Path
                                    ) -> None:
    made = {"stale.json": as_made(CONFIG), "gone.json": dataclasses.asdict(CONFIG) | {"gone": 1}}
    for name in [name for name in made if f"--out={name}" in flags]:
        file = written(tmp_path, config=made[name], cases={"0": {}})
        flags = [flag.replace(name, str(file)) for flag in flags]
    if "--head=nowhere" in flags:  # the file of the repository has other heads
        flags = [*flags, f"--out={tmp_path / 'new.json'}"]
    done = command("bench.py", "staleness", "--config=staleness", f"--workdir={tmp_path}", *flags)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("flags, message", [
    (["--questions=bugs", "--config.draft.children=top"],
     "error: bugs, arm rejection_drawn: draft.children = 'top': "),
    (["--questions=intervals"], "error: intervals, arm frozen: "),
])
def test_arm_that_cannot_run_is_refused_before_any_runs(
        command: Any, flags: list[str], message: str, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "0" / "modes" / "frozen"
    if "frozen" in message:  # what lies there is another run
        other.mkdir(parents=True)
        (other / "config.json").write_text('{"format": 2, "seed": 7}')
    done = command("bench.py", "staleness", "--config=staleness", f"--out={tmp_path / 'new.json'}",
                   f"--workdir={tmp_path / 'runs'}", *flags)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "new.json").exists() and not (tmp_path / "runs/0/modes/plain").exists()


def as_made(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(config, name="other"))


def written(tmp_path: Path, **made: Any) -> Path:
    file = tmp_path / "stale.json"
    file.write_text(json.dumps({"head_updates": 300, "heads": {}, "summary": {}} | made))
    return file


@pytest.mark.full
def test_arms_and_seeds_are_added_to_the_file(command: Any, tmp_path: Path) -> None:
    """A second command runs what the first left, a bug is stamped, and a head must be the same;
    one that is given is not trained."""
    def ask(*flags: str, head: str = "--head_updates=2", name: str = "bugs") -> Any:
        return command(
            "bench.py", "staleness", "--config=staleness", "--config.model.path=random:tiny",
            "--config.model.numerics=default", "--config.steps=2", "--config.data.examples=8",
            "--config.rollout.max_new_tokens=8", "--questions=bugs", head,
            f"--out={tmp_path / name}.json", f"--workdir={tmp_path / name}", *flags)

    def made() -> dict[str, Any]:
        return json.loads((tmp_path / "bugs.json").read_text())

    done = ask("--arms=lossy_greedy")
    assert done.returncode == 0, done.stderr
    first = made()
    assert list(first["cases"]["0"]) == ["plain", "frozen", "lossy_greedy"]
    assert [case["lossy"] for case in first["cases"]["0"].values()] == [False, False, True]
    done = ask("--arms=lossy_retrospective,lossy_greedy")
    assert done.returncode == 0 and "seed 0, bugs: lossy_greedy" not in done.stderr, done.stderr
    assert {name: made()["cases"]["0"][name] for name in first["cases"]["0"]} == first["cases"]["0"]
    head = tmp_path / "bugs" / "0" / "head" / "drafter"
    done = ask("--arms=lossy_greedy", "--seeds=1", head=f"--head={head}", name="given")
    assert done.returncode == 0, done.stderr
    given = json.loads((tmp_path / "given.json").read_text())
    assert given["heads"]["1"]["checksum"] == first["heads"]["0"]["checksum"]
    assert not (tmp_path / "given" / "1" / "head").exists()
    (head / "model.safetensors").write_bytes(b"other")
    done = ask("--arms=lossy_accept_all")
    assert done.returncode == 2 and "is not the one that arms in the file" in done.stderr


@pytest.mark.ci
def test_interleaved_runs_survive_a_killed_one(
        small: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """b is killed in its second turn, and c has one turn more than a."""
    monkeypatch.setattr(subprocess_runner, "run_turn", noted)
    actual = subprocess_runner.train_interleaved({name: (small, tmp_path / name) for name in "abc"})
    assert (tmp_path / "turns").read_text() == "abcabcacc"
    assert list(actual) == ["b"] and isinstance(actual["b"], subprocess_runner.ProcessDied)


ORPHAN = """
import multiprocessing, os, sys, time
sys.path.insert(0, sys.argv[1])
from studies.subprocess_runner import end_with_parent

def wait():
    end_with_parent()
    print("ready", flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=wait).start()
"""


def test_subprocess_ends_with_its_parent(tmp_path: Path) -> None:
    """Its output ends with the last process that can write to it."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    parent = subprocess.Popen([sys.executable, script, ROOT / "experiments"], text=True,
                              stdout=subprocess.PIPE, env=script_environment())
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    assert parent.communicate(timeout=HANGS) == ("", None)


def kill(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def noted(config: Config, workdir: Path, cache: bool, title: str) -> bool:
    """A turn that is written down; whether the run has more."""
    turns = workdir.parent / "turns"
    said = (turns.read_text() if turns.exists() else "") + title
    turns.write_text(said)
    if said.count("b") == 2 and title == "b":
        kill()
    return said.count(title) < {"a": 3, "b": 3, "c": 4}[title]
