"""Terms composed to a reward: in this process and in workers, their errors and their limits."""

import os
import sys
import time

import pytest

from specrl_jax.config import ConfigError
from specrl_jax.rl import judge

EXAMPLE = {"id": 7, "question": "What is 52 + 21?", "answer": "73"}


def length(prompt, completion, example):
    return len(completion)


def broken(prompt, completion, example):
    raise RuntimeError("no\nnumber")


def infinite(prompt, completion, example):
    return float("inf")


def listed(prompt, completion, example):
    return [1.0]


def leaving(prompt, completion, example):
    raise SystemExit(3)


def other_signature(completions, **others):
    return [0.0]


def stuck_in_c(prompt, completion, example):
    return float(9 ** 9 ** 9 if completion == "stuck" else 1)


def dying(prompt, completion, example):
    os._exit(3)


def of(terms, answers, **options):
    return judge.compose(terms, (1.0,) * len(terms), **options)(answers)


def test_terms_are_weighted_and_told_one_by_one():
    composed = judge.compose(("exact", "exact_only", f"{__name__}:length"), (1.0, 0.5, -0.25))
    found = composed([("", "It is 73", EXAMPLE), ("", "73", EXAMPLE)])
    assert found[0].terms == {"exact": 1, "exact_only": 0, f"{__name__}:length": 8}
    assert [one.total for one in found] == [1 - 2, 1 + 0.5 - 0.5]


@pytest.mark.parametrize("terms, words", [
    (("exakt",), ["exakt", "exact", "package.module:name"]),
    (("no_such_module:f",), ["no_such_module", "PYTHONPATH"]),
    (("math:no_such_function",), ["no_such_function", "defines"]),
    (("math:pi",), ["math:pi", "function"]),
    (("digits",), ["digits", "renamed; use digit_fraction"]),
    (("exact", "exact"), ["exact", "once"]),
    (("exact:",), ["exact:"]),
    ((f"{__name__}:other_signature",), ["other_signature", "function of (prompt, completion, e"]),
])
def test_bad_terms_are_refused_in_a_line(terms, words):
    with pytest.raises(ConfigError) as error:
        judge.compose(terms, (1.0,) * len(terms))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_weights_must_match():
    with pytest.raises(ConfigError, match="reward.weights"):
        judge.compose(("exact", "exact_only"), (1.0,))


@pytest.mark.parametrize("name, example, words", [
    (f"{__name__}:broken", EXAMPLE, "example 7, answer '74': RuntimeError: no number"),
    (f"{__name__}:leaving", EXAMPLE, "example 7, answer '74': SystemExit: 3"),
    (f"{__name__}:infinite", EXAMPLE, "example 7, answer '74': returned inf"),
    (f"{__name__}:listed", EXAMPLE, "returned [1.0]; a reward must be a finite number"),
    ("exact", {"id": 3, "answer": "x"}, "example 3, answer '74': ValueError: the answer 'x'"),
    ("exact", {"id": 3}, "example 3, answer '74': KeyError: 'answer'"),
])
def test_a_failing_reward_is_named_with_its_answer(name, example, words):
    with pytest.raises(judge.RewardError) as error:
        of((name,), [("", "74", example)])
    assert f"reward {name!r}" in str(error.value) and words in str(error.value)
    assert "\n" not in str(error.value)


def test_ctrl_c_in_a_reward_is_the_users(monkeypatch):
    def interrupted(prompt, completion, example):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge.evaluate("mine", interrupted, "", "", EXAMPLE)


def test_latex_beyond_the_limit_is_wrong_and_is_told():
    told = []
    answers = [("", text, {"id": i, "answer": r"\frac{1}{2}"})
               for i, text in enumerate(("0.5", "$9^{9^{9^9}}$", r"$\frac{2}{4}$"))]
    found = of(("latex",), answers, workers=1, seconds=0.5, warn=told.append)
    assert [one.total for one in found] == [1, 0, 1]
    assert told == ["1 of 3 answers count as wrong; the first: reward 'latex', example 1, answer "
                    "'$9^{9^{9^9}}$': took over reward.seconds = 0.5"]


def test_latex_names_an_answer_that_it_cannot_read():
    with pytest.raises(judge.RewardError, match="example 3, answer '1': ValueError: math-verify"):
        of(("latex",), [("", "1", {"id": 3, "answer": ""})])


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
    with pytest.raises(judge.RewardError, match="ended its process with status 3"):
        of((f"{__name__}:dying",), [("", "1", EXAMPLE)], **options)
    with pytest.raises(judge.RewardError, match="SystemExit: 3"):
        of((f"{__name__}:leaving",), [("", "1", EXAMPLE)], **options)


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
