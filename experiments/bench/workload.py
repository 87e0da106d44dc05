"""Workloads: made-up prompts, and the length of each response."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from specrl_jax.data.datasets.levels import LEVELS, problems
from specrl_jax.model.tokenizer import Tokenizer

WORKLOADS = ("uniform", "heavy")
HEAVY_ROWS = (16, 64)
NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fatma", "Goran", "Hana")
STORIES = (
    "{name} has {a} {thing} and buys {b} boxes with {c} {thing} in each. How many {thing} does "
    "{name} have now?",
    "{name} picks {a} {thing} on Monday and {b} more than that on Tuesday, then gives {c} of them "
    "to a friend. How many {thing} are left?",
    "A shop sells {thing} at {c} dollars each. {name} has {a} dollars and earns {b} more. How many "
    "{thing} can {name} buy, and how many dollars remain?",
    "{name} reads {c} pages a day for {b} days of a book with {a} pages more than that. How many "
    "pages does the book have?")
THINGS = ("apples", "marbles", "stamps", "pencils", "cookies")


@dataclasses.dataclass(frozen=True)
class Workload:
    """One batch: every row has a slot from the start, and no token ends a row."""

    name: str
    prompts: list[list[int]]  # token ids, each row's own
    limits: np.ndarray  # i32[rows] tokens to generate

    @property
    def rows(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.limits.max())

    @property
    def tokens(self) -> int:
        """Tokens of all rows, which tokens/s counts."""
        return int(self.limits.sum())

    @property
    def prompt_lengths(self) -> np.ndarray:
        """i32[rows]"""
        return np.asarray([len(p) for p in self.prompts], np.int32)


def make_workload(name: str, rows: int, new_tokens: int, tokenizer: Tokenizer) -> Workload:
    """Returns a workload: `uniform` rows of `new_tokens`, or a `heavy` tail of up to twice that."""
    prompts = [tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]))
               for text, _ in zip(questions(), range(rows), strict=False)]
    limits = (heavy_limits(rows, 2 * new_tokens) if name == "heavy"
              else np.full(rows, new_tokens, np.int32))
    return Workload(name, prompts, limits)


def heavy_limits(rows: int, most: int) -> np.ndarray:
    """Returns heavy-tailed lengths i32[rows] that scale with `most`."""
    drawn = np.random.default_rng(0).exponential(60 / 256 * most, rows)
    return np.minimum(most, most // 16 + drawn.astype(int)).clip(1).astype(np.int32)


def questions() -> Iterator[str]:
    """Yields distinct questions: sums and word problems alternate."""
    sums = problems(next(level for level in LEVELS if level.name == "chain"))
    rng = np.random.default_rng(0)
    for count, problem in enumerate(sums):
        yield f"{problem.question} Explain each step."
        a, b, c = (int(x) for x in rng.integers(2, 100, 3))
        yield STORIES[count % len(STORIES)].format(
            a=a, b=b, c=c, name=NAMES[int(rng.integers(len(NAMES)))],
            thing=THINGS[int(rng.integers(len(THINGS)))])
