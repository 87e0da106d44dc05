"""Datasets of the extras `hf` and `tasks`: what they give, and what they refuse in one line."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from specrl_jax.config import ConfigError, DataConfig, RewardConfig
from specrl_jax.data.examples import load_examples
from specrl_jax.rewards import judge


def load(**fields: Any) -> list[Any]:
    return list(load_examples(DataConfig(**fields), print))


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, with its cache in a directory of the test and no network."""
    module = pytest.importorskip("datasets", reason="the extra `hf` is not installed")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True)
    return module


@pytest.fixture
def reasoning() -> Any:
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    from specrl_jax.data.datasets import reasoning as module

    return module


@pytest.mark.parametrize("name, module, extra", [
    ("hf", "datasets", "hf"), ("reasoning_gym", "reasoning_gym.factory", "tasks")])
def test_missing_extra_is_named(
        monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for own in ("huggingface", "reasoning"):
        monkeypatch.delitem(sys.modules, f"specrl_jax.data.datasets.{own}", raising=False)
    with pytest.raises(ConfigError, match=rf"data.name = '{name}': .*specrl-jax\[{extra}\]"):
        load(name=name, path="x", task=("chain_sum",))


@pytest.mark.ci
def test_hf_reads_files_directories_and_saved_datasets(datasets: Any, tmp_path: Path) -> None:
    rows = [{"q": f"{i} + 1?", "answer": i + 1, "id": "x"} for i in range(6)]
    made = datasets.Dataset.from_list(rows)
    folder, saved = tmp_path / "folder", tmp_path / "saved"
    folder.mkdir()
    made.select(range(4)).to_parquet(folder / "train.parquet")
    made.select(range(4, 6)).to_parquet(folder / "test.parquet")
    datasets.DatasetDict(train=made, test=made.select([5])).save_to_disk(saved)
    for path, split, want in (
            (folder, "train", [1, 2, 3, 4]), (folder, "test", [5, 6]), (saved, "test", [6]),
            (folder / "test.parquet", "test", [5, 6]), (folder / "train.parquet", "test[:50%]",
                                                        [1, 2])):
        actual = load(name="hf", path=str(path), split=split, question_field="q")
        assert [int(x["answer"]) for x in actual] == want
        assert [x["id"] for x in actual] == list(range(len(want)))
    assert len(load(name="hf", path=str(folder), question_field="q", examples=3)) == 3
    with pytest.raises(ConfigError, match="data.question_field = 'question': .*it has q, answer"):
        load(name="hf", path=str(folder))
    with pytest.raises(ConfigError, match="folder': cannot be read as split 'dev'"):
        load(name="hf", path=str(folder), split="dev", question_field="q")
    with pytest.raises(ConfigError, match="data.path = 'openai/gsm8k': cannot be read as split "
                                          "'train' of main .*hub that can be reached"):
        load(name="hf", path="openai/gsm8k", subset="main")


MIXTURE = ("chain_sum:3,min_terms=2,max_terms=2", "leg_counting", "chain_sum,min_terms=5")


@pytest.mark.ci
def test_reasoning_gym_mixes_tasks_by_weight(reasoning: Any) -> None:
    actual = load(name="reasoning_gym", task=MIXTURE, examples=20)
    assert [sum(x["task"] == text for x in actual) for text in MIXTURE] == [12, 4, 4]
    assert actual == load(name="reasoning_gym", task=MIXTURE, examples=20)
    assert actual[:7] == load(name="reasoning_gym", task=MIXTURE, examples=7)
    assert len(re.findall("[-+]", actual[0]["question"])) == 1 and "- 1" not in actual[0]["task"]


@pytest.mark.ci
def test_reasoning_gym_splits_and_seeds_share_no_seed(reasoning: Any) -> None:
    seeds = [{x["task_seed"] for x in load(name="reasoning_gym", task=("chain_sum",), examples=50,
                                           split=split, seed=seed)}
             for split in ("train", "test") for seed in (0, 1, 1999)]
    assert len(set.union(*seeds)) == 6 * 50 and max(map(max, seeds)) < 2**32


@pytest.mark.ci
@pytest.mark.parametrize("workers", [0, 1])
def test_reasoning_gym_scores_as_the_package_does(reasoning: Any, workers: int) -> None:
    example = load(name="reasoning_gym", task=MIXTURE, examples=1)[0]
    right, judged = example["answer"], judge.of_config(
        RewardConfig(("reasoning_gym",), workers=workers))
    answers = (f"<answer>{right}</answer>", f"so\n#### {right}", right, "<answer></answer>",
               f"<answer>{right}0</answer><answer>{right}</answer>", f"it is {right}")
    actual = [x.total for x in judged([("", text, example) for text in answers])]
    assert actual[:5] == [1, 1, 1, 0, 1] and 0 < actual[5] < 1


@pytest.mark.parametrize("fields, words", [
    ({"task": ("chain_sums",)}, "data.task = 'chain_sums': choose one of .*chain_sum, "),
    ({"task": ("countdown",)}, "data.task = 'countdown': its scoring runs answers as Python"),
    ({"task": ("chain_sum:0",)}, "data.task = 'chain_sum:0': give NAME, NAME:WEIGHT or"),
    ({"task": ("chain_sum,min_tems=1",)}, "unexpected keyword argument 'min_tems'; correct its"),
    ({"task": ()}, "data.task = .*: name a task"),
    ({"task": ("chain_sum",), "split": "dev"}, "data.split = 'dev': choose train or test"),
    ({"task": ("chain_sum",), "path": "x"}, "data.path = 'x': reasoning_gym reads no file")])
def test_reasoning_gym_refuses_what_cannot_work(
        reasoning: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        load(name="reasoning_gym", **fields)
    assert "\n" not in str(refused.value)


@pytest.mark.ci
def test_tasks_that_run_answers_as_python_are_known(reasoning: Any) -> None:
    runs = re.compile(r"\b(eval|exec|parse_expr|sympify)\((?!entry)")
    actual = {name for name, (cls, _) in reasoning.factory.DATASETS.items()
              if runs.search(inspect.getsource(cls.score_answer))}
    assert actual == set(reasoning.UNSAFE)
