"""Terms composed to a reward: in this process and in workers, their errors and their limits."""

import math
import os
import sys
import time

import pytest

from specrl_jax.config import ConfigError, RewardConfig
from specrl_jax.rewards import judge
from specrl_jax.rewards.reward import batched
from specrl_jax.rewards.workers import Outcome, Workers

EXAMPLE = {"id": 7, "question": "What is 52 + 21?", "answer": "73"}


def length(prompt, completion, example):
    return len(completion)


def given(prompt, completion, example):
    return example["value"]


def broken(prompt, completion, example):
    raise RuntimeError("no\nnumber")


def other_signature(completions, **others):
    return [0.0]


def stuck_in_c(prompt, completion, example):
    return float(9 ** 9 ** 9 if completion == "stuck" else 1)


def dying(prompt, completion, example):
    os._exit(3)


@batched
def shares(prompts, completions, examples):
    """How often each answer was given."""
    if "raise" in completions:
        raise RuntimeError("model\nis down")
    if "short" in completions:
        return [1.0]
    return [math.nan if x == "nan" else completions.count(x) / len(completions)
            for x in completions]


def compose(terms, weights, warn=lambda text: None, **options):
    return judge.of_config(RewardConfig(terms, weights, **options), warn)


def of(terms, answers, **options):
    return compose(terms, (1.0,) * len(terms), **options)(answers)


def test_terms_are_weighted_and_told_one_by_one():
    composed = compose(("exact", "exact_only", f"{__name__}:length"), (1.0, 0.5, -0.25))
    actual = composed([("", "It is 73", EXAMPLE), ("", "73", EXAMPLE)])
    assert actual[0].terms == {"exact": 1, "exact_only": 0, f"{__name__}:length": 8}
    assert [one.total for one in actual] == [1 - 2, 1 + 0.5 - 0.5]


@pytest.mark.parametrize("terms, words", [
    (("exakt",), ["exakt", "exact", "package.module:name"]),
    (("no_such_module:f",), ["no_such_module", "PYTHONPATH"]),
    (("math:no_such_function",), ["no_such_function", "defines"]),
    (("math:pi",), ["math:pi", "function"]),
    (("exact", "exact"), ["exact", "once"]),
    ((f"{__name__}:other_signature",), ["other_signature", "function of (prompt, completion, e"]),
])
def test_bad_terms_are_refused_in_a_line(terms, words):
    for value in ("go on", "nan", ""):
        with pytest.raises(ConfigError, match=f"reward.on_failure = '{value}': give stop, or a n"):
            RewardConfig(on_failure=value)
    with pytest.raises(ConfigError) as error:
        compose(terms, (1.0,) * len(terms))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, example, words", [
    (f"{__name__}:broken", EXAMPLE, "example 7, answer '74': RuntimeError: no number"),
    ("latex", {"id": 3, "answer": ""}, "example 3, answer '74': ValueError: math-verify"),
    (f"{__name__}:given", EXAMPLE | {"value": math.inf}, "example 7, answer '74': returned inf"),
    (f"{__name__}:given", EXAMPLE | {"value": [1.0]}, "returned [1.0]; a reward must be a finite"),
    (f"{__name__}:given", EXAMPLE | {"value": 1e39}, "example 7, answer '74': returned 1e+39"),
    ("exact", {"id": 3, "answer": "x"}, "example 3, answer '74': ValueError: the answer 'x'"),
    ("exact", {"id": 3}, "example 3, answer '74': KeyError: 'answer'"),
])
def test_a_failing_reward_is_named_with_its_answer(name, example, words):
    with pytest.raises(judge.RewardError) as error:
        of((name,), [("", "74", example)])
    assert f"reward {name!r}" in str(error.value) and words in str(error.value)
    assert "\n" not in str(error.value)


def test_latex_beyond_the_limit_is_wrong_and_is_told():
    told = []
    answers = [("", text, {"id": i, "answer": r"\frac{1}{2}"})
               for i, text in enumerate(("0.5", "$9^{9^{9^9}}$", r"$\frac{2}{4}$"))]
    actual = of(("latex",), answers, workers=1, seconds=0.5, warn=told.append)
    assert [one.total for one in actual] == [1, 0, 1]
    assert told == ["1 of 3 answers count as wrong; the first: reward 'latex', example 1, answer "
                    "'$9^{9^{9^9}}$': took over reward.seconds = 0.5"]


@pytest.mark.ci
def test_workers_judge_all_terms_in_order_with_limits():
    terms, options = (f"{__name__}:length", f"{__name__}:stuck_in_c"), {"workers": 2}
    answers = [("", "x" * i, EXAMPLE) for i in range(20)]
    here, there = (of(terms, answers, **o) for o in ({}, options))
    assert here == there and [one.total for one in here] == list(range(1, 21))
    began = time.process_time()
    with pytest.raises(judge.RewardError, match="answer 'stuck': took over reward.seconds = 0.5"):
        of(terms, [("", "stuck", EXAMPLE)], seconds=0.5, **options)
    assert time.process_time() - began < 1  # not in this process
    with pytest.raises(judge.RewardError, match="took over reward.seconds = 0.1"):
        of((f"{__name__}:sleeping",), [("", "1", EXAMPLE)], seconds=0.1, **options)
    with pytest.raises(judge.RewardError, match="ended its process with status 3"):
        of((f"{__name__}:dying",), [("", "1", EXAMPLE)], **options)


def test_answers_that_exact_cannot_judge_are_refused_before():
    examples = [EXAMPLE, {"id": 8, "answer": "1/2"}]
    judge.check_answers(("latex",), examples)
    with pytest.raises(ConfigError, match="example 8: the answer '1/2' is not a number; use latex"):
        judge.check_answers(("exact",), examples)


@pytest.mark.ci
def test_reward_whose_process_cannot_start_is_refused_in_a_line(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=f"^reward.terms: the process for {__name__}:length did"):
        of((f"{__name__}:length",), [("", "1", EXAMPLE)], workers=1)


def test_failing_answers_count_as_configured_and_are_marked():
    told, terms = [], (f"{__name__}:length", f"{__name__}:sometimes")
    answers = [("", text, EXAMPLE) for text in ("1", "bad", "nan", "22")]
    actual = compose(terms, (1.0, 2.0), on_failure="-0.5", warn=told.append)(answers)
    assert [one.total for one in actual] == [1 + 2, 3 - 1, 3 - 1, 2 + 2]
    assert [list(one.failures) for one in actual] == [[], [terms[1]], [terms[1]], []]
    assert actual[1].failures[terms[1]] == (
        f"reward {terms[1]!r}, example 7, answer 'bad': ValueError: bad")
    assert told == [f"2 of 4 answers count as -0.5; the first: {actual[1].failures[terms[1]]}"]


def sometimes(prompt, completion, example):
    if completion == "bad":
        raise ValueError("bad")
    return math.nan if completion == "nan" else 1.0


@pytest.mark.ci
def test_answers_that_hang_or_kill_a_worker_count_as_configured():
    told, terms = [], (f"{__name__}:stuck_in_c", f"{__name__}:dies_of_it")
    answers = [("", text, EXAMPLE) for text in ("1", "stuck", "2", "die", "3", "grow")]
    actual = of(terms, answers, workers=2, seconds=0.5, on_failure="0", warn=told.append)
    assert [one.total for one in actual] == [2, 1, 2, 1, 2, 1] and len(told) == 2
    assert "took over reward.seconds = 0.5" in actual[1].failures[terms[0]]
    assert "ended its process with status 3" in actual[3].failures[terms[1]]
    assert "needs over 4 GiB" in actual[5].failures[terms[1]]


def dies_of_it(prompt, completion, example):
    if completion == "grow":
        return float(bytes(5 * 2**30)[0])
    return os._exit(3) if completion == "die" else 1.0


def sleeping(prompt, completion, example):
    time.sleep(3600)


@pytest.mark.ci
def test_workers_that_were_killed_are_started_again():
    made = Workers(1, [f"{__name__}:length"], 2.0)
    for answer in ("a", "bb"):
        assert made.judge(f"{__name__}:length", [("", answer, EXAMPLE)]) == [Outcome(len(answer))]
        assert made._process is not None
        made._process.kill()


def test_batched_reward_gets_all_answers_in_this_process():
    terms = (f"{__name__}:length", f"{__name__}:shares")
    made = compose(terms, (0.0, 1.0), workers=1)
    assert made.whole and not compose(terms[:1], (1.0,)).whole
    actual = compose(terms[1:], (1.0,))([("", x, EXAMPLE) for x in "aab"])
    assert [one.total for one in actual] == [2 / 3, 2 / 3, 1 / 3]
    assert made([]) == []


@pytest.mark.parametrize("said, words", [
    ("raise", "a batch of 3 answers: RuntimeError: model is down"),
    ("short", "a batch of 3 answers: ValueError: returned 1 values; return one per answer"),
    ("nan", "example 7, answer 'nan': returned nan")])
def test_batched_reward_that_fails_stops_or_counts(said, words):
    answers = [("", x, EXAMPLE) for x in ("a", said, "a")]
    with pytest.raises(judge.RewardError, match=words):
        of((f"{__name__}:shares",), answers)
    actual = of((f"{__name__}:shares",), answers, on_failure="3")
    assert actual[1].total == 3 and all(words in x for x in actual[1].failures.values())
    assert actual[0].total == (2 / 3 if said == "nan" else 3)


def test_ctrl_c_in_a_reward_is_the_users(monkeypatch):
    def interrupted(prompt, completion, example):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge.evaluate("mine", interrupted, "", "", EXAMPLE)
