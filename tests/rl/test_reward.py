"""Rewards against tables worked by hand, and their composition."""

import threading
from decimal import Decimal

import pytest

from specrl_jax.config import ConfigError
from specrl_jax.rl import reward

EXAMPLE = {"id": 7, "question": "What is 52 + 21?", "answer": "73"}


def length(prompt, completion, example):
    return len(completion)


def broken(prompt, completion, example):
    return 1 / 0


def infinite(prompt, completion, example):
    return float("inf")


@pytest.mark.parametrize("text, number", [
    ("73", "73"),
    ("The answer is 73.", "73"),
    ("52 + 21 = 73", "73"),
    ("**73**", "73"),
    ("73.0", "73"),
    ("73.50", "73.5"),
    (".5", "0.5"),
    ("$1,234.50.", "1234.5"),
    ("12,345,678", "12345678"),
    ("1, 2, 3", "3"),
    ("1,2,34", "34"),
    ("-5", "-5"),
    ("−5", "-5"),
    ("+5", "5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("--5", "-5"),
    ("it is -5.", "-5"),
    ("10-5", "5"),
    ("10 - 5", "5"),
    ("(2)-5", "5"),
    ("12 - 45 = -33", "-33"),
    ("50%", "50"),
    ("12 eggs\n#### 72", "72"),
    ("#### 72\nI used 3 steps.", "72"),
    ("#### 1\n#### 2", "2"),
    ("5 ####", None),
    ("no number", None),
    ("", None),
    ("٣", None),
])
def test_final_number(text, number):
    assert reward.final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("completion, value", [
    ("73", 1), ("It is 73.0.", 1), ("74", 0), ("73 or 74", 0), ("", 0), ("-73", 0), ("#### 73", 1),
])
def test_exact(completion, value):
    assert reward.exact("", completion, EXAMPLE) == value


def test_exact_reads_a_written_answer():
    assert reward.exact("", "1234", {"answer": "$1,234"}) == 1


@pytest.mark.parametrize("completion, value", [
    ("73", 1), (" 73\n", 1), ("-1,234.5", 1), ("$5", 1), ("9", 1),
    ("73.", 0), ("It is 73", 0), ("7 3", 0), ("52+21", 0), ("", 0),
])
def test_exact_only(completion, value):
    assert reward.exact_only("", completion, EXAMPLE) == value


@pytest.mark.parametrize("completion, value", [
    ("52 + 21 = 73\n#### 73", 1), ("#### 9\n", 1), (r"so \boxed{9}.", 1), (r"\boxed{ -1,000 }", 1),
    ("#### 73\nDone.", 0), ("#### seventy", 0), ("73", 0), (r"\boxed{x}", 0), ("", 0),
])
def test_has_answer_marker(completion, value):
    assert reward.has_answer_marker("", completion, EXAMPLE) == value


@pytest.mark.parametrize("completion, value", [("73", 1), ("a1", 0.5), ("ab", 0), ("", 0)])
def test_digit_fraction(completion, value):
    assert reward.digit_fraction("", completion, EXAMPLE) == value


LATEX = [
    (r"\frac{1}{2}", r"so $\frac{2}{4}$", 1),
    (r"\frac{1}{2}", "0.5", 1),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0),
    ("x^2+2x+1", r"$(x+1)^2$", 1),
    (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1),
    ("73", r"The sum is \boxed{73}.", 1),
    ("73", "", 0),
]


@pytest.mark.parametrize("answer, completion, value", LATEX)
def test_latex(answer, completion, value):
    assert reward.latex("", completion, {"answer": answer}) == value


def test_latex_in_another_thread():
    values = []
    thread = threading.Thread(target=lambda: values.extend(
        reward.latex("", completion, {"answer": answer}) for answer, completion, _ in LATEX))
    thread.start()
    thread.join()
    assert values == [value for *_, value in LATEX]


def test_latex_gives_up_on_what_never_ends(monkeypatch):
    monkeypatch.setattr(reward, "LATEX_SECONDS", 1)
    assert reward.latex("", "$9^{9^{9^9}}$", EXAMPLE) == 0


def test_compose():
    composed = reward.compose(("exact", "exact_only", f"{__name__}:length"), (1.0, 0.5, -0.25))
    total, values = composed("", "It is 73", EXAMPLE)
    assert values == {"exact": 1, "exact_only": 0, f"{__name__}:length": 8}
    assert total == 1 - 2


@pytest.mark.parametrize("terms, words", [
    (("exakt",), ["exakt", "exact", "package.module:name"]),
    (("no_such_module:f",), ["no_such_module", "PYTHONPATH"]),
    (("math:no_such_function",), ["no_such_function", "defines"]),
    (("math:pi",), ["math:pi", "function"]),
    (("digits",), ["digits", "renamed; use digit_fraction"]),
    (("exact", "exact"), ["exact", "once"]),
    (("exact:",), ["exact:"]),
])
def test_bad_terms_are_refused_in_a_line(terms, words):
    with pytest.raises(ConfigError) as error:
        reward.compose(terms, (1.0,) * len(terms))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_weights_must_match():
    with pytest.raises(ConfigError, match="reward.weights"):
        reward.compose(("exact", "exact_only"), (1.0,))


@pytest.mark.parametrize("name, example, words", [
    (f"{__name__}:broken", EXAMPLE, "example 7: ZeroDivisionError"),
    (f"{__name__}:infinite", EXAMPLE, "example 7: returned inf"),
    ("exact", {"id": 3, "answer": "x"}, "example 3: ValueError: the answer 'x'"),
    ("latex", {"id": 3, "answer": ""}, "example 3: ValueError: math-verify"),
    ("exact", {"id": 3}, "example 3: KeyError: 'answer'"),
])
def test_a_failing_reward_is_named(name, example, words):
    with pytest.raises(reward.RewardError, match=words) as error:
        reward.compose((name,), (1.0,))("", "73", example)
    assert repr(name) in str(error.value)
