"""Evaluation inside a run: it agrees with eval.py, changes no token, and keeps the best."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import kill_when, repeatable_metrics, run_training, start_training, with_fields

from specrl_jax.checkpoint.checkpoints import list_steps
from specrl_jax.config import Config, ConfigError
from specrl_jax.evaluation.evaluate import evaluate
from specrl_jax.metrics.names import find
from specrl_jax.metrics.run_files import read_metrics, read_samples
from specrl_jax.model.source import best_step, open_actor
from specrl_jax.training.in_run import InRun, metrics_of
from specrl_jax.training.run import train
from specrl_jax.training.trainer import Trainer

STEPS = 6


@pytest.fixture(scope="module")
def config() -> Config:
    """Digits pay off at once, and the evaluation counts an answer with a few as correct."""
    return with_fields(
        Config(), name="small", steps=STEPS, prompts_per_step=2, group_size=2, checkpoint_every=4,
        checkpoint_keep=1, model__path="random:tiny", data__examples=4, spec__depth=2,
        reward__terms=("digit_fraction",), control__policy="fixed", rollout__batch_size=4,
        rollout__max_prompt_tokens=96, rollout__max_new_tokens=8, rollout__min_batch=4,
        learner__learning_rate=3e-2, learner__micro_batch=4, eval__every=2, eval__examples=5,
        eval__samples=2, eval__temperature=1.0, eval__reward="test_in_run:any_digit")


def any_digit(prompt: str, completion: str, example: object) -> float:
    return float(any(x.isdecimal() for x in completion))


@pytest.fixture(scope="module", autouse=True)
def importable() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


@pytest.fixture(scope="module")
def whole(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train(config, workdir)
    return workdir


def evaluations(workdir: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name.startswith("eval/")}
            for row in repeatable_metrics(workdir)]


@pytest.mark.ci
def test_evaluation_is_due_every_so_many_steps(whole: Path) -> None:
    actual = evaluations(whole)
    assert [bool(row) for row in actual] == [False, True] * 3
    assert {"eval/accuracy", "eval/pass_at_2", "eval/pass_at_2_low"} <= actual[1].keys()
    assert all(row["compilations"] == 0 for row in read_metrics(whole))
    assert all(find(name) for row in read_metrics(whole) for name in row)


@pytest.mark.ci
def test_evaluation_changes_no_token_of_the_training(
        config: Config, whole: Path, tmp_path: Path) -> None:
    train(with_fields(config, eval__every=0), tmp_path / "run")
    assert list(read_samples(tmp_path / "run")) == list(read_samples(whole))
    plain = repeatable_metrics(tmp_path / "run")
    assert plain == [{name: x for name, x in row.items() if not name.startswith("eval/")}
                     for row in repeatable_metrics(whole)]


@pytest.mark.ci
def test_speculation_changes_no_evaluation(config: Config, whole: Path, tmp_path: Path) -> None:
    train(with_fields(config, control__policy="off"), tmp_path / "run")
    plain, drafted = (evaluations(run)[1::2] for run in (tmp_path / "run", whole))
    assert {row.pop("eval/accept_length") for row in plain} == {1.0}
    assert max(row.pop("eval/accept_length") for row in drafted) > 1
    assert plain == drafted


@pytest.mark.ci
def test_best_checkpoint_outlives_later_ones_and_eval_py_agrees(
        config: Config, whole: Path) -> None:
    actual = evaluations(whole)[1::2]
    accuracy = [row["eval/accuracy"] for row in actual]
    best = 2 * accuracy.index(max(accuracy)) + 2
    assert best_step(whole) == best == actual[-1]["eval/best_step"]
    assert json.loads((whole / "best.json").read_text())["accuracy"] == max(accuracy)
    assert list_steps(whole / "checkpoints") == sorted({best, STEPS})
    again = metrics_of(evaluate(config, open_actor(config, whole, "best")))
    assert again.items() - {("eval/accept_length", again["eval/accept_length"])} <= (
        actual[best // 2 - 1].items())
    assert 0 < max(accuracy) and min(accuracy) < 1


@pytest.mark.ci
@pytest.mark.parametrize("fields", [
    {"learner__lora_rank": 4, "learner__learning_rate": 0.3},
    {"rl__advantage": "greedy_baseline", "eval__samples": 1, "eval__temperature": 0.0},
    {"rl__advantage": "greedy_baseline", "learner__lora_rank": 4, "learner__learning_rate": 0.3},
], ids=["adapters", "greedy_baseline", "both"])
def test_evaluation_agrees_with_eval_py(
        config: Config, tmp_path: Path, fields: dict[str, Any]) -> None:
    config = with_fields(config, steps=4, **fields)
    train(config, tmp_path)
    again = metrics_of(evaluate(config, open_actor(config, tmp_path, 4)))
    del again["eval/accept_length"]  # that of drafts which another rollout has judged
    assert again.items() <= evaluations(tmp_path)[3].items()


@pytest.mark.ci
@pytest.mark.parametrize("samples", [2, 3])
def test_run_that_goes_on_evaluates_as_one_that_never_stopped(
        config: Config, whole: Path, tmp_path: Path, samples: int) -> None:
    """With 3 samples, the evaluation has an engine of its own."""
    config = with_fields(config, eval__samples=samples)
    if samples != 2:
        whole = tmp_path / "whole"
        train(config, whole)
    train(with_fields(config, steps=4), tmp_path / "run")
    assert len(read_metrics(tmp_path / "run")) == 4
    train(config, tmp_path / "run")
    assert repeatable_metrics(tmp_path / "run") == repeatable_metrics(whole)
    assert best_step(tmp_path / "run") == best_step(whole)
    assert f"eval/pass_at_{samples}" in evaluations(whole)[1]


@pytest.mark.ci
def test_another_evaluation_starts_a_new_best(
        config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(with_fields(config, steps=2), tmp_path)
    train(with_fields(config, eval__examples=3, steps=4), tmp_path)
    assert "another evaluation than before: checkpoint 2 is no longer the" in capsys.readouterr(
        ).err
    assert best_step(tmp_path) == 4


@pytest.mark.ci
def test_best_is_kept_while_a_run_does_not_evaluate(config: Config, tmp_path: Path) -> None:
    train(with_fields(config, steps=2), tmp_path)
    best = (tmp_path / "best.json").read_text()
    train(with_fields(config, steps=6, eval__every=0), tmp_path)
    assert list_steps(tmp_path / "checkpoints") == [2, 6]  # checkpoint_keep=1, and the best
    assert (tmp_path / "best.json").read_text() == best


@pytest.mark.parametrize("fields, message", [
    ({"eval__split": "train"}, "all 4 examples of specrl_arithmetic that it selects are trained"),
    ({"eval__split": "dev"}, "eval.every = 2: .*split"),
    ({"eval__reward": "nice"}, "eval.every = 2: reward.terms = 'nice'")])
def test_evaluation_of_nothing_held_out_is_refused(
        config: Config, fields: dict[str, Any], message: str) -> None:
    trainer, _ = Trainer.from_config(with_fields(config, eval__examples=4))
    trainer.config = with_fields(config, eval__examples=4, **fields)
    with pytest.raises(ConfigError, match=message):
        InRun(trainer, print, print)


@pytest.mark.full
def test_killed_run_evaluates_as_one_that_was_not(tmp_path: Path) -> None:
    flags = ("--config.steps=12", "--config.checkpoint_every=5", "--config.checkpoint_keep=1",
             "--config.eval.every=2", "--config.eval.examples=4", "--config.eval.temperature=1.0",
             "--config.eval.reward=helpers:even", "--config.eval.samples=2")
    run_training(tmp_path / "whole", *flags)
    workdir = tmp_path / "run"
    for goal in (3, 7, 10):
        kill_when(start_training(workdir, *flags),
                  lambda goal=goal: len(steps_so_far(workdir)) >= goal)
    run_training(workdir, *flags)
    assert repeatable_metrics(workdir) == repeatable_metrics(tmp_path / "whole")
    kept, wanted = (list_steps(run / "checkpoints") for run in (workdir, tmp_path / "whole"))
    assert kept == wanted == sorted({12, best_step(workdir)})


def steps_so_far(workdir: Path) -> list[str]:
    path = workdir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []
