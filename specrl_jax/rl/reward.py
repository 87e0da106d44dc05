"""Rewards: pure host functions of (prompt, completion, example), summed by weight.

A config can also name a function anywhere else, as "package.module:function".
"""

import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from specrl_jax.config import ConfigError, Registry, check
from specrl_jax.config.renamed import RENAMED_REWARDS
from specrl_jax.io.data import Example

Reward = Callable[[str, str, Example], float]
ComposedReward = Callable[[str, str, Example], tuple[float, dict[str, float]]]

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
SIGN = r"(?:(?<![\w.)])[-+−])?"  # not after an operand: "10-5" ends in 5
NUMBER = re.compile(rf"(?:{SIGN}\$?|\$[-+−]?)(?:{DIGITS})")
ANSWER_MARK = "####"  # GSM8K's
LATEX_SECONDS = 5

REWARDS: Registry[Reward] = Registry("reward.terms", Callable)


class RewardError(ConfigError):
    """A reward raised or returned no finite number; the message names reward and example."""


@REWARDS.register("exact")
def exact(prompt: str, completion: str, example: Example) -> float:
    """Returns 1 if the completion's final number equals example["answer"] in value.

    The final number is the first one after the last "####", or without that mark the last one.

    Raises:
      ValueError: the example's answer is not a number.
    """
    expected = final_number(str(example["answer"]))
    if expected is None:
        raise ValueError(f"the answer {example['answer']!r} holds no number; use latex for it")
    return float(final_number(completion) == expected)


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


@REWARDS.register("latex")
def latex(prompt: str, completion: str, example: Example) -> float:
    """Returns 1 if math-verify finds the completion's final expression equal to the answer.

    Parsing and comparing may each take LATEX_SECONDS in the main thread. In other threads there is
    no limit: math-verify interrupts by a signal, which only the main thread receives.
    """
    import math_verify  # imports SymPy, which is slow

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it logs every time limit
    main = threading.current_thread() is threading.main_thread()
    seconds: Any = LATEX_SECONDS if main else None
    parse = functools.partial(math_verify.parse, parsing_timeout=seconds)
    gold = parse(f"\\boxed{{{example['answer']}}}")
    if not gold:
        raise ValueError(f"math-verify cannot read the answer {example['answer']!r}")
    return float(math_verify.verify(gold, parse(completion), timeout_seconds=seconds))


def final_number(text: str) -> Decimal | None:
    """Returns the first number after the last "####", or else the last number; None without one.

    Thousands separators, a leading dollar, a sign, decimals and a trailing period are understood.
    """
    _, mark, tail = text.rpartition(ANSWER_MARK)
    numbers = NUMBER.findall(tail)
    if not numbers:
        return None
    return Decimal(re.sub(r"[$,]", "", numbers[0 if mark else -1]).replace("−", "-"))


def compose(terms: Sequence[str], weights: Sequence[float]) -> ComposedReward:
    """Returns a function that returns (weighted sum, {term: unweighted value}).

    That function raises RewardError if a term raises or returns no finite number.

    Raises:
      ConfigError: a term is unknown, renamed or named twice, or has no finite weight.
    """
    check(len(terms) == len(weights), "reward.weights", weights,
          f"give one weight for each of the {len(terms)} terms")
    check(len(set(terms)) == len(terms), "reward.terms", terms, "name each term once")
    check(all(map(math.isfinite, weights)), "reward.weights", weights, "must be finite")
    for name in terms:
        check(name not in RENAMED_REWARDS, "reward.terms", name,
              f"renamed; use {RENAMED_REWARDS.get(name)}")
    functions = {name: REWARDS.resolve(name) for name in terms}

    def reward(prompt: str, completion: str, example: Example) -> tuple[float, dict[str, float]]:
        values = {name: _evaluate(name, function, prompt, completion, example)
                  for name, function in functions.items()}
        total = sum(w * values[name] for name, w in zip(terms, weights, strict=True))
        return float(total), values

    return reward


def _evaluate(name: str, function: Reward, prompt: str, completion: str, example: Example
              ) -> float:
    """Returns a term's value; any exception of it becomes a RewardError that names the example."""
    where = f"reward {name!r}, example {example.get('id')}"
    try:
        value = float(function(prompt, completion, example))
    except Exception as error:  # a reward may raise anything
        raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
    if not math.isfinite(value):
        raise RewardError(f"{where}: returned {value}; a reward must be finite")
    return value
