"""The staleness experiment: how arms are compared, and what is kept."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

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
def case(tmp_path: Path) -> dict[str, Any]:
    plain = staleness_account.account(arm(tmp_path / "plain", 1.0), CONFIG, None)
    fast = arm(tmp_path / "fast", 0.5, **{"rollout/accept_length": 2.5, "time/distill": 0.25,
                                          "distill/updates": 2, "drafter/faults": 1})
    return {"plain": plain, "fast": staleness_account.account(fast, CONFIG, plain)}


def test_account_saved_and_spent_seconds_add_up(case: Any) -> None:
    fast = case["fast"]
    assert fast["saved_seconds"] == [0.5] * 8 and fast["spent_seconds"] == [0.25] * 8
    assert fast["acceptance"] == [0.5] * 8 and fast["faults"] == 1 and fast["tokens_equal"]
    summary = staleness_account.summarize({"0": case, "1": case}, "plain")
    assert summary["fast"]["net_seconds"] == [2.0, 2.0, 2.0]
    assert summary["plain"]["net_seconds"][0] == 0
    assert summary["fast"]["acceptance_end"] == [0.5] * 3


def test_summary_differences_are_paired_by_seed(case: Any) -> None:
    """Seeds differ by far more than arms do, and arms by the same in each."""
    cases = {str(seed): {name: one | {"reward": [seed + (name == "fast") / 8] * 8}
                         for name, one in case.items()} for seed in range(5)}
    summary = staleness_account.summarize(cases, "plain")["fast"]
    low, high = summary["reward_end"][1:]
    assert high - low > 3 and summary["seeds"] == 5
    assert summary["over_plain"]["reward_end"] == pytest.approx([0.125] * 3)
    assert summary["reward_distance"] == pytest.approx([0.125] * 3)


def test_account_unequal_token_fails_only_where_exact(case: Any, tmp_path: Path) -> None:
    other = arm(tmp_path / "other", 1.0, token=6)
    with pytest.raises(ConfigError, match="its tokens are not those of"):
        staleness_account.account(other, CONFIG, case["plain"])
    lawful = staleness_arms.configs(CONFIG, "bugs", "")["rejection"]
    assert not staleness_account.account(other, lawful, case["plain"])["tokens_equal"]


@pytest.mark.ci
def test_interleaved_runs_survive_a_killed_one(
        small: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """b is killed in its second turn, and c has one turn more than a."""
    monkeypatch.setattr(subprocess_runner, "run_turn", noted)
    actual = subprocess_runner.train_interleaved({name: (small, tmp_path / name) for name in "abc"})
    assert (tmp_path / "turns").read_text() == "abcabcacc"
    assert list(actual) == ["b"] and isinstance(actual["b"], subprocess_runner.ProcessDied)


def noted(config: Config, workdir: Path, cache: bool, title: str) -> bool:
    """A turn that is written down; whether the run has more."""
    turns = workdir.parent / "turns"
    said = (turns.read_text() if turns.exists() else "") + title
    turns.write_text(said)
    if said.count("b") == 2 and title == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    return said.count(title) < {"a": 3, "b": 3, "c": 4}[title]
