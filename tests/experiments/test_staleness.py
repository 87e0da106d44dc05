"""The staleness experiment: how arms are compared, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from experiments import config_flags
from experiments.bench import staleness
from specrl_jax.config import ConfigError
from specrl_jax.host.metrics import Writer


def arm(workdir: Path, seconds: float, token: int = 5, **metrics: Any) -> Path:
    """A run of 8 steps."""
    with Writer(workdir, 0) as writer:
        for step in range(8):
            told = {"step": step, "time/rollout": seconds, "time/step": 2.0, "reward/mean": 0.5,
                    "rollout/accept_length": 1.0} | metrics
            writer.write_step(told, [{"tokens": [token, step], "reward": 0.5}])
    return workdir


@pytest.fixture
def arms(tmp_path: Path) -> tuple[Path, Path]:
    return (arm(tmp_path / "plain", 1.0),
            arm(tmp_path / "fast", 0.5, **{"rollout/accept_length": 2.5, "time/distill": 0.25,
                                           "distill/updates": 2, "drafter/faults": 1}))


def test_an_arm_saves_what_plain_took_longer_and_spends_on_its_drafter(arms: Any) -> None:
    config = config_flags.load("staleness")
    found = {path.name: staleness.account(path, arms[0], config) for path in arms}
    fast = found["fast"]
    assert fast["saved_seconds"] == [0.5] * 8 and fast["spent_seconds"] == [0.25] * 8
    assert fast["acceptance"] == [0.5] * 8 and fast["faults"] == 1 and fast["tokens_equal"]
    told = staleness.summarize({"0": found, "1": found})
    assert told["fast"]["net_seconds"] == [2.0, 2.0, 2.0] and told["plain"]["net_seconds"][0] == 0
    assert told["fast"]["acceptance_end"] == [0.5] * 3


def test_beginning_and_end_are_a_quarter_each(arms: Any) -> None:
    found = staleness.account(arms[1], arms[0], config_flags.load("staleness"))
    found["acceptance"] = [0.1, 0.3, 0, 0, 0, 0, 0.5, 0.9]
    told = staleness.summarize({"0": {"fast": found}})["fast"]
    assert told["acceptance_begin"] == pytest.approx([0.2] * 3)
    assert told["acceptance_end"] == pytest.approx([0.7] * 3)


def test_another_token_is_an_error_only_where_tokens_must_be_equal(
        arms: Any, tmp_path: Path) -> None:
    other, config = arm(tmp_path / "other", 1.0, token=6), config_flags.load("staleness")
    with pytest.raises(ConfigError, match="its tokens are not those of"):
        staleness.account(other, arms[0], config)
    lawful = dataclasses.replace(config, spec=dataclasses.replace(config.spec, rule="rejection"))
    assert not staleness.account(other, arms[0], lawful)["tokens_equal"]


def test_the_figure_is_drawn(arms: Any, tmp_path: Path) -> None:
    found = {path.name: staleness.account(path, arms[0], config_flags.load("staleness"))
             for path in arms}
    staleness.draw({"0": found, "1": found}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize("flag, message", [
    ("--arms=often", "--arms=often: choose some of every_step, every_5"),
    ("--seeds=a", "--seeds=a: give whole numbers"),
])
def test_bad_input_ends_in_one_line(command: Any, flag: str, message: str, tmp_path: Path) -> None:
    done = command("staleness.py", "--config=staleness", f"--workdir={tmp_path}", flag)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
