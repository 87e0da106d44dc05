"""Judging answers: the terms of a reward, in this process or in workers with limits."""

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specrl_jax.config import ConfigError, RewardConfig, check
from specrl_jax.config.tasks import STOP, RewardError
from specrl_jax.data.examples import Example
from specrl_jax.rewards.reward import REWARDS, Reward, expected_number, is_batched
from specrl_jax.rewards.workers import Outcome, Workers

ALWAYS_IN_WORKERS = ("latex",)  # where an answer beyond the limits is wrong
MOST_WORKERS = 8
LARGEST = 1e30  # of a value; sums of such stay finite in float32
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


Answer = tuple[str, str, Example]
"""What a reward reads: (prompt, completion, example)."""


class Judged(NamedTuple):
    """The weighted sum of an answer's terms, their values by name, and what went wrong with them.
    """

    total: float
    terms: Mapping[str, float]
    failures: Mapping[str, str]  # by term; empty where nothing failed


@dataclasses.dataclass(frozen=True)
class Judge:
    """Judges answers, in their order; see `of_config`."""

    terms: Mapping[str, "Term"]
    weights: Sequence[float]
    on_failure: str
    warn: Callable[[str], None]
    whole: bool  # a term wants all answers of a rollout at once, so that none must be split

    def __call__(self, answers: Sequence[Answer]) -> list[Judged]:
        """Returns the weighted sum of the terms of each answer. Raises RewardError if a term fails
        and `on_failure` is STOP."""
        columns = {name: self._counted(name, term(answers)) for name, term in self.terms.items()}
        return [self._sum({name: column[i] for name, column in columns.items()})
                for i in range(len(answers))]

    def _sum(self, row: Mapping[str, Outcome]) -> Judged:
        total = sum(w * one.value for w, one in zip(self.weights, row.values(), strict=True))
        return Judged(float(total), {name: one.value for name, one in row.items()},
                      {name: one.error or one.limit for name, one in row.items()
                       if one.error or one.limit})

    def _counted(self, name: str, outcomes: list[Outcome]) -> list[Outcome]:
        """Returns a term's values, with those that failed counted as they should be."""
        stops, failed = self.on_failure == STOP, [x for x in outcomes if x.error or x.limit]
        if stops:
            for one in failed:
                if one.error or name not in ALWAYS_IN_WORKERS:
                    raise RewardError(one.error or one.limit)
        if not failed:
            return outcomes
        value = 0.0 if stops else float(self.on_failure)
        self.warn(f"{len(failed)} of {len(outcomes)} answers count as "
                  f"{'wrong' if stops else f'{value:g}'}; the first: "
                  f"{failed[0].error or failed[0].limit}")
        return [x._replace(value=value) if x.error or x.limit else x for x in outcomes]


Term = Callable[[Sequence[Answer]], list[Outcome]]
"""Answers -> the value of one term of each, or its failure as a whole line."""


def of_config(config: RewardConfig, warn: Callable[[str], None] = lambda text: None) -> Judge:
    """Returns a function that judges answers, in their order.

    A term fails where it raises, exits or returns no finite number, or if one in a worker exceeds
    its limits or dies. Then that function raises RewardError, or the term counts as
    `config.on_failure`; a completion for which `latex` exceeds the limits is wrong.

    Args:
      warn: called with a line about answers that failed.

    Raises:
      ConfigError: a term is unknown, or takes other arguments.
    """
    terms, workers = config.terms, config.workers
    here = {name: _resolve(name) for name in terms if name not in ALWAYS_IN_WORKERS}
    batched = {name for name, function in here.items() if is_batched(function)}
    away = [name for name in terms if name not in here or workers and name not in batched]
    pool = Workers(workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS), away, config.seconds)

    def term(name: str) -> Term:
        if name in away:
            return functools.partial(_in_workers, pool, name)
        run = _at_once if name in batched else _one_by_one
        return functools.partial(run, name, here[name])

    return Judge({name: term(name) for name in terms}, config.weights, config.on_failure, warn,
                 bool(batched))


def _resolve(name: str) -> Reward:
    """Returns a reward by its name. Raises ConfigError if it cannot be called as one."""
    function = REWARDS.resolve(name)
    try:
        inspect.signature(function).bind("", "", {})
    except TypeError as error:
        raise ConfigError(f"reward.terms = {name!r}: {error}; a reward is a function of (prompt, "
                          "completion, example), or of lists of them (batched)") from error
    except ValueError:  # some builtins have no signature
        pass
    return function


def evaluate(name: str, function: Reward, prompt: str, completion: str, example: Example) -> float:
    """Returns a term's value; whatever it raises, or exits with, becomes a RewardError."""
    with _guarded(lambda problem: _failure(name, completion, example, problem)):
        value = function(prompt, completion, example)
    return _finite(name, value, completion, example)


@contextlib.contextmanager
def _guarded(failure: Callable[[str], RewardError]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:  # the user's, not the reward's
        raise
    except BaseException as error:  # a reward may raise anything, SystemExit too
        raise failure(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _finite(name: str, value: Any, completion: str, example: Example) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST:
        raise _failure(name, completion, example,
                       f"returned {_short.repr(value)}; a reward must be a finite number")
    return number


def _failure(name: str, completion: str, example: Example, problem: str) -> RewardError:
    return RewardError(f"reward {name!r}, example {example.get('id')}, answer "
                       f"{_short.repr(completion)}: {problem}")


def _outcome(function: Callable[..., float], *args: Any) -> Outcome:
    """Returns a value, or its failure."""
    try:
        return Outcome(function(*args))
    except RewardError as error:
        return Outcome(error=str(error))


def _one_by_one(name: str, function: Reward, answers: Sequence[Answer]) -> list[Outcome]:
    return [_outcome(evaluate, name, function, *answer) for answer in answers]


def _at_once(name: str, function: Any, answers: Sequence[Answer]) -> list[Outcome]:
    """Returns the values of a term that wants the whole batch; see `reward.batched`."""
    if not answers:
        return []
    prompts, completions, examples = (list(column) for column in zip(*answers, strict=True))
    try:
        with _guarded(lambda problem: RewardError(
                f"reward {name!r}, a batch of {len(answers)} answers: {problem}")):
            values = list(function(prompts, completions, examples))
            if len(values) != len(answers):
                raise ValueError(f"returned {len(values)} values; return one per answer")
    except RewardError as error:
        return [Outcome(error=str(error))] * len(answers)
    return [_outcome(_finite, name, *one)
            for one in zip(values, completions, examples, strict=True)]


def _in_workers(pool: Workers, name: str, answers: Sequence[Answer]) -> list[Outcome]:
    return [outcome._replace(limit=str(_failure(name, completion, example, outcome.limit)))
            if outcome.limit else outcome for (_, completion, example), outcome in
            zip(answers, pool.judge(name, answers), strict=True)]


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
