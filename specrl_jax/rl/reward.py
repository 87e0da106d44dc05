"""Rewards: pure host functions of (prompt, completion, example), composed by weight.

A reward of one's own needs no change here: name it as "package.module:function".
"""

import contextlib
import functools
import importlib
import logging
import math
import re
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from specrl_jax.config import ConfigError, check

Example = Mapping[str, Any]
Reward = Callable[[str, str, Example], float]
ComposedReward = Callable[[str, str, Example], tuple[float, dict[str, float]]]

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
SIGN = r"(?:(?<![\w.)])[-+−])?"  # not after an operand: "10-5" ends in 5
NUMBER = re.compile(rf"(?:{SIGN}\$?|\$[-+−]?)(?:{DIGITS})")
ANSWER_MARK = "####"  # GSM8K's
LATEX_SECONDS = 5


class RewardError(ConfigError):
    """A reward raised, or returned no finite number; names the reward and the example's id."""


def exact(prompt: str, completion: str, example: Example) -> float:
    """1 if the completion's final number equals example["answer"], however it is written.

    The final number is the first after the last "####", or else the last of all.

    Raises:
      ValueError: the example's answer is not a number.
    """
    expected = final_number(str(example["answer"]))
    if expected is None:
        raise ValueError(f"the answer {example['answer']!r} holds no number; use latex for it")
    return float(final_number(completion) == expected)


def bare(prompt: str, completion: str, example: Example) -> float:
    """1 if the completion is a number and nothing else, white space apart."""
    return float(NUMBER.fullmatch(completion.strip()) is not None)


def marked(prompt: str, completion: str, example: Example) -> float:
    r"""1 if a number is given as the answer: "#### 42" as the last line, or \boxed{42}."""
    last_line = completion.strip().rpartition("\n")[2].strip()
    answers = re.findall(r"\\boxed\{([^{}]*)\}", completion)
    if last_line.startswith(ANSWER_MARK):
        answers.append(last_line.removeprefix(ANSWER_MARK))
    return float(any(NUMBER.fullmatch(answer.strip()) for answer in answers))


def digits(prompt: str, completion: str, example: Example) -> float:
    """The fraction of characters that are 0-9: what even random weights can learn."""
    return sum(x in "0123456789" for x in completion) / max(len(completion), 1)


def latex(prompt: str, completion: str, example: Example) -> float:
    """1 if math-verify finds the completion's final expression equal to example["answer"].

    Each of the two steps may take LATEX_SECONDS in the main thread. In others it is not limited:
    math-verify interrupts by a signal, which only the main thread receives.
    """
    import math_verify  # with SymPy, which is slow to import

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every time limit
    main = threading.current_thread() is threading.main_thread()
    seconds = LATEX_SECONDS if main else None
    parse = functools.partial(math_verify.parse, parsing_timeout=seconds)
    gold = parse(f"\\boxed{{{example['answer']}}}")
    if not gold:
        raise ValueError(f"math-verify cannot read the answer {example['answer']!r}")
    return float(math_verify.verify(gold, parse(completion), timeout_seconds=seconds))


REWARDS = types.MappingProxyType({
    "exact": exact,
    "bare": bare,
    "format": marked,
    "digits": digits,
    "latex": latex,
})


def final_number(text: str) -> Decimal | None:
    """The first number after the last "####", or without such a mark the last number; None if none.

    Understands thousands separators, a leading dollar, a sign, decimals and a trailing period.
    """
    _, mark, tail = text.rpartition(ANSWER_MARK)
    numbers = NUMBER.findall(tail)
    if not numbers:
        return None
    return Decimal(re.sub(r"[$,]", "", numbers[0 if mark else -1]).replace("−", "-"))


def resolve(name: str) -> Reward:
    """The reward of that name, or the function that "package.module:function" names.

    Raises:
      ConfigError: neither exists.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, colon, function = name.partition(":")
    check(bool(module and colon and function), "reward.terms", name,
          f"choose from {', '.join(REWARDS)}, or name your own as package.module:function")
    try:
        reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"reward.terms = {name!r}: {error}; its module must be importable, for "
                          "example from a directory in PYTHONPATH") from error
    check(callable(reward), "reward.terms", name, "must name a function")
    return reward


def compose(terms: Sequence[str], weights: Sequence[float]) -> ComposedReward:
    """A function that returns (weighted sum, {term: unweighted value}).

    It raises RewardError if a term raises or returns no finite number.

    Raises:
      ConfigError: an unknown term, one that is named twice, or not one finite weight for each.
    """
    check(len(terms) == len(weights), "reward.weights", weights,
          f"give one weight for each of the {len(terms)} terms")
    check(len(set(terms)) == len(terms), "reward.terms", terms, "name each term once")
    check(all(map(math.isfinite, weights)), "reward.weights", weights, "must be finite")
    functions = {name: resolve(name) for name in terms}

    def reward(prompt: str, completion: str, example: Example) -> tuple[float, dict[str, float]]:
        values = {name: _evaluate(name, function, prompt, completion, example)
                  for name, function in functions.items()}
        total = sum(w * values[name] for name, w in zip(terms, weights, strict=True))
        return float(total), values

    return reward


def _evaluate(
    name: str, function: Reward, prompt: str, completion: str, example: Example
) -> float:
    where = f"reward {name!r}, example {example.get('id')}"
    with _Blame(where):
        value = float(function(prompt, completion, example))
    if not math.isfinite(value):
        raise RewardError(f"{where}: returned {value}; a reward must be finite")
    return value


class _Blame(contextlib.AbstractContextManager):
    """Turns whatever a reward raises into a RewardError that says which reward, and on what."""

    def __init__(self, where: str):
        self.where = where

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            message = f"{self.where}: {type(error).__name__}: {error}"
            raise RewardError(message) from error
