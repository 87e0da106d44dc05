"""Rewards: pure host functions of (prompt, completion, example); judge.py sums them by weight.

A config can also name a function anywhere else, as "package.module:function".
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, TypeVar

from specrl_jax.config import Registry
from specrl_jax.data.examples import Example

Reward = Callable[[str, str, Example], float]
BatchReward = Callable[[Sequence[str], Sequence[str], Sequence[Example]], Sequence[float]]
Batched = TypeVar("Batched", bound=BatchReward)

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
SIGN = r"(?:(?<![\w.)])[-+−])?"  # not after an operand: "10-5" ends in 5
NUMBER = re.compile(rf"(?:{SIGN}\$?|\$[-+−]?)(?:{DIGITS})")
# 3/2, 10^5 and 3:30 are no numbers, and neither do they end in one
EXPRESSION = re.compile(rf"{NUMBER.pattern}(?:[/^:](?:{DIGITS}))*")
ANSWER_MARK = "####"  # GSM8K's

BATCHED = "wants_the_whole_batch"  # attribute of such a function

REWARDS: Registry[Reward] = Registry("reward.terms", Callable)


def batched(function: Batched) -> Batched:
    """Marks a reward that gets all answers of a rollout at once, as lists of prompts, completions
    and examples, and returns one number an answer. Greedy answers (rl.advantage=greedy_baseline)
    come in a call of their own, as do those of each further rollout (rl.filter=dynamic). One
    process of a run calls it, outside the workers.
    """
    setattr(function, BATCHED, True)
    return function


def is_batched(function: Callable[..., Any]) -> bool:
    """Returns whether a reward is marked by `batched`."""
    return getattr(function, BATCHED, False)


@REWARDS.register("exact")
def exact(prompt: str, completion: str, example: Example) -> float:
    """Returns 1 if the completion's final number equals example["answer"] in value.

    The final number is the first one after the last "####", or without that mark the last one.

    Raises:
      ValueError: the example's answer is not one number, see `expected_number`.
    """
    return float(final_number(completion) == expected_number(example))


@REWARDS.register("exact_only")
def exact_only(prompt: str, completion: str, example: Example) -> float:
    """Returns 1 if the completion is one number and nothing else but white space."""
    return float(NUMBER.fullmatch(completion.strip()) is not None)


@REWARDS.register("has_answer_marker")
def has_answer_marker(prompt: str, completion: str, example: Example) -> float:
    r"""Returns 1 if a number is marked as the answer: a last line "#### 42", or \boxed{42}."""
    last_line = completion.strip().rpartition("\n")[2].strip()
    answers = re.findall(r"\\boxed\{([^{}]*)\}", completion)
    if last_line.startswith(ANSWER_MARK):
        answers.append(last_line.removeprefix(ANSWER_MARK))
    return float(any(NUMBER.fullmatch(answer.strip()) for answer in answers))


@REWARDS.register("digit_fraction")
def digit_fraction(prompt: str, completion: str, example: Example) -> float:
    """Returns the fraction of characters that are 0-9, which even random weights can learn."""
    return sum(x in "0123456789" for x in completion) / max(len(completion), 1)


REWARDS.register("latex")("specrl_jax.rewards.latex:latex")


@REWARDS.register("reasoning_gym")
def reasoning_gym(prompt: str, completion: str, example: Example) -> float:
    """Returns the score that data.name=reasoning_gym gives to an answer: what stands in the last
    <answer> </answer>, else after the last "####", else the whole completion."""
    from specrl_jax.data.datasets import reasoning  # needs an extra

    marked = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    answer = marked[-1] if marked else completion.rpartition(ANSWER_MARK)[2]
    return reasoning.score(answer.strip(), example["task"], example["task_seed"])


def expected_number(example: Example) -> Decimal:
    """Returns the number that example["answer"] is, after its last "####" if it has that mark.

    Raises:
      ValueError: it is no number, or more than that: a currency sign before it and a per cent sign
        or full stop after it are all that may stand there.
    """
    text = str(example["answer"]).rpartition(ANSWER_MARK)[2].strip()
    if NUMBER.fullmatch(re.sub(r"[%.]$", "", text)) is None:
        raise ValueError(f"the answer {example['answer']!r} is not a number; use latex for it")
    return _value(re.sub(r"[%.]$", "", text))


def final_number(text: str) -> Decimal | None:
    """Returns the first number after the last "####", or else the last number; None without one.

    Thousands separators, a leading dollar, a sign, decimals and a trailing period are understood.
    A fraction, a power or a time such as 3:30 is no number.
    """
    _, mark, tail = text.rpartition(ANSWER_MARK)
    numbers = EXPRESSION.findall(tail)
    if not numbers or NUMBER.fullmatch(numbers[0 if mark else -1]) is None:
        return None
    return _value(numbers[0 if mark else -1])


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[$,]", "", number).replace("−", "-"))
