"""Faults of a drafter: what its weights show, and what a few probe rollouts show.

Verification keeps tokens right whatever is drafted, so a broken drafter never corrupts tokens; it
only slows rollouts down. Hence weights are compared with what was published before each rollout,
and a probe measures acceptance after each publish.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.state import RolloutInputs
from specrl_jax.runtime.checksum import summary
from specrl_jax.structs import Array, DrafterParams, PyTree

NOT_FINITE, ZEROED, DEAD = "not finite", "zeroed", "dead"
MISMATCH = "not as published"

DEAD_SHARE = 0.5  # a probe that accepts less than this share of the expected drafts fails
RATE_DECAY = 0.9  # least share of the expected acceptance rate that a worse probe leaves
EVIDENCE = 12  # expected accepted drafts of a probe; with 4 or fewer, chance looks like a fault
MOST_ANSWERS = 8  # of a probe, if the batch has fewer rows


class Summary(NamedTuple):
    """Distinguishes weights of equal shapes."""

    checksum: int  # of all bits, each weighted by its position
    finite: bool  # all floating-point values
    zero: bool  # all floating-point values

    @property
    def fault(self) -> str:
        """The fault that the weights show by themselves; "" if none."""
        return NOT_FINITE if not self.finite else ZEROED if self.zero else ""


def summarize(weights: DrafterParams) -> Summary:
    """Returns the summary of a tree of arrays; waits for the devices."""
    checksum, finite, zero = summary(weights)
    return Summary(int(checksum), bool(finite), bool(zero))


def fault_of(actual: Summary, expected: Summary) -> str:
    """Returns the fault of weights that differ from what was expected; "" if they are equal."""
    if actual == expected:
        return ""
    return NOT_FINITE if not actual.finite else (
        ZEROED if actual.zero and not expected.zero else MISMATCH)


def identical(a: PyTree, b: PyTree) -> bool:
    """Whether two trees hold the same array objects, whose bits cannot differ."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(left) == len(right) and all(x is y for x, y in zip(left, right, strict=True))


def equal(a: PyTree, b: PyTree) -> bool:
    """Whether two trees hold equal arrays; compares only those that are different objects."""
    return same_shapes(a, b) and bool(_equal([(x, y) for x, y in zip(
        jax.tree.leaves(a), jax.tree.leaves(b), strict=True) if x is not y]))


def same_shapes(a: PyTree, b: PyTree) -> bool:
    """Whether two trees have the same structure, shapes and dtypes."""
    (left, treedef), (right, other) = jax.tree.flatten(a), jax.tree.flatten(b)
    return treedef == other and all((x.shape, x.dtype) == (y.shape, y.dtype)
                                    for x, y in zip(left, right, strict=True))


@jax.jit
def _equal(pairs: list[tuple[Array, Array]]) -> Array:
    return jnp.asarray([((x == y) | (x != x) & (y != y)).all() for x, y in pairs], bool).all()


class Probe:
    """Generates a few short answers; a drafter with far too few accepted drafts is dead.

    The first of `prompts` are answered with `tokens` tokens each, 0 probes nothing. `drafter` is
    its name in metrics.
    """

    def __init__(self, sampler: Sampler, drafter: str, prompts: Sequence[Sequence[int]],
                 tokens: int) -> None:
        self._sampler, self._drafter = sampler, drafter
        self._prompts, self._tokens = prompts, tokens

    def check(self, inputs: RolloutInputs, rate: float | None) -> tuple[str, float]:
        """Returns the drafter's fault, "" if it accepts enough, and the rate to expect next.

        `rate` is the expected number of accepted drafts of a row and round; None: any will do.
        """
        if not self._tokens:
            return "", rate or 0.0
        limit = self._limit(rate or 0.0)
        result = self._sampler.probe(inputs, self._prompts, limit,
                                     self._sampler.engine.shapes.depth)
        rounds, accepted = (result.counters["row_rounds"],
                            result.by_drafter[self._drafter]["accepted"])
        expected, measured = rounds * (rate or 0.0), accepted / max(rounds, 1)
        if result.counters["broken"]:
            return NOT_FINITE, measured if rate is None else rate
        if accepted < DEAD_SHARE * expected - expected**0.5:
            return DEAD, rate or 0.0
        return "", measured if rate is None else max(measured, RATE_DECAY * rate)

    def _limit(self, rate: float) -> np.ndarray:
        """Returns i32[sequences], the tokens of each answer: as many answers as EVIDENCE needs.

        A dead drafter needs a round per token.
        """
        shapes = self._sampler.engine.shapes
        wanted = math.ceil(EVIDENCE / max(self._tokens * rate * shapes.shards, 1e-9))
        answers = max(shapes.batch, min(wanted, MOST_ANSWERS))
        live = np.arange(shapes.sequences) < answers
        return np.tile(np.where(live, self._tokens, 0), shapes.shards).astype(np.int32)
