"""Judging answers: the terms of a reward, in this process or in workers with limits."""

import inspect
import math
import os
import reprlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specrl_jax.config import ConfigError, RewardConfig, check
from specrl_jax.config.renamed import RENAMED_REWARDS
from specrl_jax.io.data import Example
from specrl_jax.rl.reward import REWARDS, Reward, expected_number
from specrl_jax.rl.workers import Workers

ALWAYS_IN_WORKERS = ("latex",)  # where an answer beyond the limits is wrong
MOST_WORKERS = 8
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


Answer = tuple[str, str, Example]
"""What a reward reads: (prompt, completion, example)."""


class Judged(NamedTuple):
    """The weighted sum of an answer's terms, and their values by name."""

    total: float
    terms: dict[str, float]


Judge = Callable[[Sequence[Answer]], list[Judged]]


class RewardError(ConfigError):
    """A reward raised or returned no finite number; the message names reward, example, answer."""


def of_config(config: RewardConfig, warn: Callable[[str], None]) -> Judge:
    """Returns the judge that `config` describes; see `compose`."""
    return compose(config.terms, config.weights, workers=config.workers, seconds=config.seconds,
                   warn=warn)


def compose(terms: Sequence[str], weights: Sequence[float], *, workers: int = 0,
            seconds: float = RewardConfig.seconds, warn: Callable[[str], None] = lambda text: None
            ) -> Judge:
    """Returns a function that judges answers, in their order.

    That function raises RewardError if a term raises, exits or returns no finite number, or if one
    in a worker exceeds its limits; a completion for which `latex` does so is wrong.

    Args:
      terms, weights, workers, seconds: see RewardConfig.
      warn: called with a line about answers that exceed the limits.

    Raises:
      ConfigError: a term is unknown, renamed or named twice, takes other arguments, or has no
        finite weight.
    """
    check(len(terms) == len(weights), "reward.weights", weights,
          f"give one weight for each of the {len(terms)} terms")
    check(len(set(terms)) == len(terms), "reward.terms", terms, "name each term once")
    check(all(map(math.isfinite, weights)), "reward.weights", weights, "must be finite")
    here = {name: _resolve(name) for name in terms if name not in ALWAYS_IN_WORKERS}
    away = [name for name in terms if workers or name not in here]
    pool = Workers(workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS), away, seconds)

    def judge(answers: Sequence[Answer]) -> list[Judged]:
        found = {name: _in_workers(pool, name, answers, warn) for name in away}
        rows = [{name: found[name][i] if name in found else evaluate(name, here[name], *answer)
                 for name in terms} for i, answer in enumerate(answers)]
        return [Judged(float(sum(w * row[name] for name, w in zip(terms, weights, strict=True))),
                       row) for row in rows]

    return judge


def _resolve(name: str) -> Reward:
    """Returns a reward by its name. Raises ConfigError if it cannot be called as one."""
    check(name not in RENAMED_REWARDS, "reward.terms", name,
          f"renamed; use {RENAMED_REWARDS.get(name)}")
    function = REWARDS.resolve(name)
    try:
        inspect.signature(function).bind("", "", {})
    except TypeError as error:
        raise ConfigError(f"reward.terms = {name!r}: {error}; a reward is a function of (prompt, "
                          "completion, example)") from error
    except ValueError:  # some builtins do not tell
        pass
    return function


def evaluate(name: str, function: Reward, prompt: str, completion: str, example: Example) -> float:
    """Returns a term's value; whatever it raises, or exits with, becomes a RewardError."""
    try:
        value = function(prompt, completion, example)
    except KeyboardInterrupt:  # the user's, not the reward's
        raise
    except BaseException as error:  # a reward may raise anything, SystemExit too
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise _failure(name, completion, example, problem) from error
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _failure(name, completion, example,
                       f"returned {_short.repr(value)}; a reward must be a finite number")
    return number


def _failure(name: str, completion: str, example: Example, problem: str) -> RewardError:
    return RewardError(f"reward {name!r}, example {example.get('id')}, answer "
                       f"{_short.repr(completion)}: {problem}")


def _in_workers(pool: Workers, name: str, answers: Sequence[Answer], warn: Callable[[str], None]
                ) -> list[float]:
    """Returns a term's value of each answer."""
    values, late = [], []
    for (_, completion, example), found in zip(answers, pool.judge(name, answers), strict=True):
        if found.error:
            raise RewardError(found.error)
        if found.limit:
            late.append(_failure(name, completion, example, found.limit))
            if name not in ALWAYS_IN_WORKERS:
                raise late[0]
        values.append(found.value)
    if late:
        warn(f"{len(late)} of {len(answers)} answers count as wrong; the first: {late[0]}")
    return values


def check_answers(terms: Sequence[str], examples: Sequence[Example]) -> None:
    """Raises ConfigError for the first example whose answer a term can never judge rightly."""
    if "reasoning_gym" in terms:
        check("task_seed" in examples[0], "reward.terms", tuple(terms),
              "reasoning_gym judges only the examples of data.name = reasoning_gym")
    if "exact" in terms:
        for i in range(len(examples)):
            try:
                expected_number(examples[i])
            except ValueError as error:
                raise ConfigError(f"reward.terms = {tuple(terms)}: example {examples[i]['id']}: "
                                  f"{error}") from error
