"""Rewards against tables worked by hand."""

from decimal import Decimal

import pytest

from specrl_jax.rewards import reward
from specrl_jax.rewards.latex import latex

EXAMPLE = {"id": 7, "question": "What is 52 + 21?", "answer": "73"}


@pytest.mark.parametrize("text, number", [
    ("73", "73"),
    ("**73**", "73"),
    ("73.50", "73.5"),
    (".5", "0.5"),
    ("$1,234.50.", "1234.5"),
    ("1, 2, 3", "3"),
    ("1,2,34", "34"),
    ("−5", "-5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("--5", "-5"),
    ("10-5", "5"),
    ("(2)-5", "5"),
    ("50%", "50"),
    ("12 eggs\n#### 72", "72"),
    ("#### 72\nI used 3 steps.", "72"),
    ("5 ####", None),
    ("2 or 3/2", None),
    ("10^5", None),
    ("at 3:30", None),
    ("1/2 = 0.5", "0.5"),
    ("", None),
    ("٣", None),
])
def test_final_number(text, number):
    assert reward.final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("answer, completion", [
    ("$1,234", "1234"), ("5%", "5"), ("-2.", "-2"), ("work\n#### 72", "72"), (" 7 ", "7")])
def test_exact_reads_a_written_answer(answer, completion):
    assert reward.exact("", completion, {"answer": answer}) == 1


@pytest.mark.parametrize("answer, completion", [
    ("1/2", "2"), (r"\frac{1}{3}", "3"), ("3:30", "30"), ("10^5", "5"), ("2 or 3", "3"), ("", ""),
    ("2x", "2"), ("5 cm", "5"), (r"\pi", "3.14"), ("#### ", "")])
def test_exact_refuses_an_answer_that_is_no_number(answer, completion):
    with pytest.raises(ValueError, match="is not a number; use latex for it"):
        reward.exact("", completion, {"answer": answer})


@pytest.mark.parametrize("name, completion, value", [
    *(("exact", text, value) for text, value in (
        ("It is 73.0.", 1), ("74", 0), ("73 or 74", 0), ("-73", 0), ("#### 73", 1), ("", 0))),
    *(("exact_only", text, value) for text, value in (
        (" 73\n", 1), ("-1,234.5", 1), ("$5", 1), ("73.", 0), ("7 3", 0), ("52+21", 0), ("", 0))),
    *(("has_answer_marker", text, value) for text, value in (
        ("52 + 21 = 73\n#### 73", 1), (r"so \boxed{9}.", 1), (r"\boxed{ -1,000 }", 1),
        ("#### 73\nDone.", 0), ("#### seventy", 0), ("73", 0), (r"\boxed{x}", 0), ("", 0))),
    *(("digit_fraction", text, value) for text, value in (("73", 1), ("a1", 0.5), ("", 0)))])
def test_rewards_by_rules(name, completion, value):
    assert getattr(reward, name)("", completion, EXAMPLE) == value


@pytest.mark.parametrize("answer, completion, value", [
    (r"\frac{1}{2}", r"so $\frac{2}{4}$", 1),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0),
    ("x^2+2x+1", r"$(x+1)^2$", 1),
    (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1),
    ("73", "", 0),
])
def test_latex(answer, completion, value):
    assert latex("", completion, {"answer": answer}) == value
