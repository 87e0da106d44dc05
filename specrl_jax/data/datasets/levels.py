"""Arithmetic problems: pure, offline, and the same on every machine and Python version.

A level is a finite space of problems, numbered by mixed radix. `problems` lists distinct ones in an
order given by a hash, so that any prefix is a fair sample of the level. The split of a problem is a
hash of its commutative form alone: splits share no problem, not even `b + a` for `a + b`, and not
across levels.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator

MAX_PROBLEMS = 20_000
TEST_ONE_IN = 10


@dataclasses.dataclass(frozen=True)
class Level:
    """Problems of `terms` operands from low..high, joined by any of `operators`.

    "*" is only for two terms: answers are worked from left to right.
    """

    name: str
    low: int
    high: int
    terms: int
    operators: str
    help: str

    @property
    def space(self) -> int:
        """The number of problems."""
        return (self.high - self.low + 1) ** self.terms * len(self.operators) ** (self.terms - 1)


LEVELS = (
    Level("add2", 10, 99, 2, "+", "sums of two 2-digit numbers"),
    Level("add1", 1, 9, 2, "+", "sums of two 1-digit numbers"),
    Level("add3", 100, 999, 2, "+", "sums of two 3-digit numbers"),
    Level("sub2", 10, 99, 2, "-", "differences of two 2-digit numbers, some negative"),
    Level("mul1", 1, 9, 2, "*", "products of two 1-digit numbers"),
    Level("mixed2", 10, 99, 2, "+-*", "sums, differences and products of two 2-digit numbers"),
    Level("chain", 10, 99, 4, "+-", "four 2-digit numbers added and subtracted, step by step"),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """`operands[0] operators[0] operands[1] ...`, worked from left to right."""

    operands: tuple[int, ...]
    operators: str

    @property
    def expression(self) -> str:
        rest = (f" {op} {x}" for op, x in zip(self.operators, self.operands[1:], strict=True))
        return f"{self.operands[0]}{''.join(rest)}"

    @property
    def question(self) -> str:
        return f"What is {self.expression}?"

    @property
    def answer(self) -> int:
        return _steps(self)[-1][1]

    @property
    def solution(self) -> str:
        """One line a step, then "#### answer", as in GSM8K."""
        lines = [f"{expression} = {value}" for expression, value in _steps(self)]
        return "\n".join([*lines, f"#### {self.answer}"])

    @property
    def commutative_form(self) -> str:
        """Equal for problems that differ only in the order of what may be swapped."""
        first = "*" if "*" in self.operators else "+"
        parts = sorted(zip(first + self.operators, self.operands, strict=True))
        return "".join(f"{op}{x}" for op, x in parts)

    @property
    def is_test(self) -> bool:
        return _digest(f"split {self.commutative_form}") % TEST_ONE_IN == 0


def problems(level: Level) -> list[Problem]:
    """Returns distinct problems of `level`, at most MAX_PROBLEMS, in their fixed order."""
    count = min(level.space, MAX_PROBLEMS)
    return [_decode(level, i) for i in itertools.islice(_distinct_draws(level), count)]


def _distinct_draws(level: Level) -> Iterator[int]:
    seen = set()
    for attempt in itertools.count():
        index = _digest(f"{level.name} {attempt}") % level.space
        if index not in seen:
            seen.add(index)
            yield index


def _decode(level: Level, index: int) -> Problem:
    operands, operators = [], ""
    for _ in range(level.terms):
        index, digit = divmod(index, level.high - level.low + 1)
        operands.append(level.low + digit)
    for _ in range(level.terms - 1):
        index, digit = divmod(index, len(level.operators))
        operators += level.operators[digit]
    return Problem(tuple(operands), operators)


def _steps(problem: Problem) -> list[tuple[str, int]]:
    """Returns (expression, value) of each operation."""
    value, steps = problem.operands[0], []
    for op, x in zip(problem.operators, problem.operands[1:], strict=True):
        expression = f"{value} {op} {x}"
        value = {"+": value + x, "-": value - x, "*": value * x}[op]
        steps.append((expression, value))
    return steps


def _digest(text: str) -> int:
    """Returns a 64-bit hash; Python's own differs between processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
