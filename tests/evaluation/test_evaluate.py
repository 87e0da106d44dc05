"""What an evaluation asks, how it counts, and which comparisons it refuses."""

import json
import types

import jax
import numpy as np
import pytest

from specrl_jax.config import Config, ConfigError, EvalConfig, RewardConfig
from specrl_jax.config.tasks import RewardError
from specrl_jax.data.prompts import Prompts, prompt_batches
from specrl_jax.evaluation import evaluate
from specrl_jax.model.tiny import byte_tokenizer
from specrl_jax.rewards import judge
from specrl_jax.runtime import processes
from specrl_jax.structs import Rollout

TOKENIZER = byte_tokenizer()
STOP = TOKENIZER.stop_ids[0]


def ask(count):
    """Prompts of `count` problems: problem 10 i has the answer i."""
    examples = [{"id": 10 * i, "question": f"{i} + 0", "answer": str(i)} for i in range(count)]
    return Prompts(examples, [e["question"] for e in examples], [[i] for i in range(count)])


def answer(prompt_id, sample_id, text, occurrence=0, stopped=True):
    tokens = TOKENIZER.encode(text) + [STOP] * stopped
    return prompt_id, sample_id, occurrence, tokens, stopped


def rollout(*answers):
    """A Rollout of answers, and a Result in which each token took a round of its own."""
    ids, samples, occurrence, tokens, stopped = zip(*answers, strict=True)
    length = np.asarray([len(t) for t in tokens], np.int32)
    padded = np.full((len(tokens), length.max()), ord("9"), np.int32)
    for i, row in enumerate(tokens):
        padded[i, : len(row)] = row
    fields = dict.fromkeys(Rollout.__dataclass_fields__, None) | dict(
        tokens=padded, length=length, stopped=np.asarray(stopped), prompt_id=np.asarray(ids),
        sample_id=np.asarray(samples), occurrence=np.asarray(occurrence))
    counters = {"committed": 2 * int(length.sum()), "row_rounds": int(length.sum())}
    return Rollout(**fields), types.SimpleNamespace(seconds=2.0, counters=counters)


def tally(count, samples, *rollouts):
    made = evaluate.Tally(ask(count), TOKENIZER, samples, judge.of_config(RewardConfig()))
    for one in rollouts:
        made.add(*one)
    return made.results()


def test_answers_are_judged_without_their_stop_token_and_padding():
    actual = tally(2, 2, rollout(
        answer(10, 0, "it is 1", stopped=False), answer(0, 1, "1"), answer(0, 0, "0"),
        answer(10, 1, "is 1"), answer(0, 0, "77", occurrence=1)))  # fills the rollout
    assert actual["problems"] == [0, 10]
    assert actual["correct"] == [[1, 0], [1, 1]]
    assert actual["accuracy"] == 0.75 and actual["interval_method"] == "bootstrap"
    assert actual["pass_at"]["1"]["mean"] == 0.75 and actual["pass_at"]["2"]["mean"] == 1
    assert actual["pass_at"]["2"]["interval_method"] == "wilson"
    assert actual["stopped"] == 0.75 and actual["mean_length"] == (7 + 2 + 2 + 5) / 4
    assert actual["tokens_per_second"] == 8 and actual["accept_length"] == 2


def test_reward_failing_elsewhere_fails_the_same_way_here(monkeypatch):
    """So that all processes of a run save the steps before they end."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    failed = {"values": [], "error": "reward 'x', example 3, answer 'y': judge is down"}
    monkeypatch.setattr(processes, "share", lambda name, mine: [mine, failed])
    with pytest.raises(RewardError, match="^process 1: reward 'x', example 3, .*: judge is down$"):
        tally(2, 1, rollout(answer(0, 0, "0"), answer(10, 0, "1")))


def test_batches_hold_every_problem_once_and_fill_the_last():
    parts = prompt_batches(ask(5), 4)
    assert [len(p.prompts) for p in parts] == [4, 4]
    ids, occurrence = (np.concatenate([getattr(p, n) for p in parts])
                       for n in ("prompt_id", "occurrence"))
    assert ids[occurrence == 0].tolist() == [0, 10, 20, 30, 40]
    assert len(set(zip(ids.tolist(), occurrence.tolist(), strict=True))) == 8
    assert parts[1].prompts == [[4], [0], [1], [2]]


def answers(correct, **changes):
    data = {"name": "a", "level": "b", "split": "test", "system": ""}
    return {"problems": list(range(len(correct))), "questions_sha256": "x", "data": data,
            "correct": correct, "reward": "exact"} | changes


def test_paired_difference():
    before, after = ([[int(i < n)] for i in range(100)] for n in (40, 60))
    pair = evaluate.paired(answers(before), answers(after))
    assert pair["difference"] == pytest.approx(0.2) and pair["baseline_accuracy"] == 0.4
    assert (pair["better"], pair["worse"]) == (20, 0)
    assert pair["interval"] == pytest.approx([0.13, 0.28], abs=0.02)  # unpaired: 0.06 .. 0.34
    assert evaluate.paired(answers(after), answers(before))["difference"] == pytest.approx(-0.2)


@pytest.mark.parametrize("terms, asked, reward", [
    (("exact_only", "exact"), "", "exact"), (("latex",), "", "latex"), (("exact",), "a:b", "a:b"),
    (("digit_fraction",), "", "exact"), (("exact_only", "mine:judge"), "", "mine:judge")])
def test_answers_are_judged_by_the_runs_reward(terms, asked, reward):
    config = Config(reward=RewardConfig(terms=terms, weights=(1.0,) * len(terms)),
                    eval=EvalConfig(reward=asked))
    assert evaluate.reward_of(config) == reward


def test_samples_at_temperature_0_are_refused():
    with pytest.raises(ConfigError, match="eval.samples = 8: at temperature 0 all answers are the"):
        EvalConfig(samples=8)


@pytest.mark.parametrize("change, message", [
    ({"problems": [0, 2]}, "its problems differ"),
    ({"questions_sha256": "y"}, "its questions differ"),
    ({"reward": "latex"}, "--reward = 'latex': the baseline was judged by 'exact'"),
    ({"data": {"name": "a", "level": "b", "split": "train"}}, "data.split = 'train': the baseline"),
])
def test_pairing_refuses_other_problems(change, message):
    with pytest.raises(ConfigError, match=message):
        evaluate.paired(answers([[1], [0]]), answers([[1], [0]], **change))


@pytest.mark.parametrize("text", ["{", "3", json.dumps({"problems": [1]})])
def test_other_files_are_no_baseline(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="give a file that eval.py --out wrote"):
        evaluate.read_evaluation(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="missing.json"):
        evaluate.read_evaluation(tmp_path / "missing.json")


def test_digest_notices_another_answer():
    one, other = ask(3), ask(3)
    other.examples[1]["answer"] = "9"
    first, again, changed = map(evaluate.questions_digest, (one, ask(3), other))
    assert first == again != changed
