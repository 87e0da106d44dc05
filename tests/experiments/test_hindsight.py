"""Hindsight of the controller benchmark: gains by load, and the ceiling, against sums by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.bench import hindsight


def timed(*launches: tuple[int, int, int, int, float]) -> Any:
    """Of launches with batch, tokens, rows times rounds, rounds, seconds."""
    trace, total = [], np.zeros(3, int)
    for batch, *counts, seconds in launches:
        total = total + counts
        trace.append(dict(zip(hindsight.COUNTS, total.tolist(), strict=True))
                     | {"batch": batch, "seconds": seconds})
    return SimpleNamespace(trace=trace)


def said(*commits: list[int]) -> Any:
    """Of tokens in each round of each row."""
    return SimpleNamespace(sequences=SimpleNamespace(commits=np.asarray(commits)))


def test_gains_are_of_each_batch_size() -> None:
    off = hindsight.paces([timed((4, 8, 8, 2, 1.0), (2, 6, 6, 3, 1.5)), timed((4, 8, 8, 2, 3.0))])
    fast = hindsight.paces([timed((4, 12, 6, 2, 2.0))])  # two tokens a row; off's rounds take 1 s
    assert fast == {4: (2.0, 1.0)} and off == {4: (1.0, 1.0), 2: (1.0, 0.5)}
    found = hindsight.gains({"off": off, "1x1x2": fast}, ["1x1x2"], [2, 4])
    assert np.isnan(found[0, 0]) and found[1, 0] == pytest.approx(2.0)


def test_what_any_rollout_refused_is_not_acceptable() -> None:
    """Chains of two got three tokens, two and one; of the last one nothing is known besides."""
    good = hindsight.acceptable({2: said([3, 2, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0])}, most=6)
    assert good.tolist() == [[True] * 4 + [False] * 2, [False] * 3 + [True] * 3]
    # A chain of one was refused the third token, which chains of two had no draft for.
    both = hindsight.acceptable({2: said([3, 3, 0, 0, 0, 0]), 1: said([2, 1, 2, 1, 0, 0])}, most=6)
    assert both.tolist() == [[True, True, False, True, True, False]]


def test_a_draft_that_had_no_room_was_not_refused() -> None:
    """Two rows want six tokens of the first round; in the second one row is left."""
    good = hindsight.acceptable({2: said([1, 1], [1, 0])}, most=5)
    assert good.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("most, seconds", [
    (4, 1.2 + 1.1 + 1),  # two drafts for the first row, then one, then none
    (2, 3 + 1.1 + 1)])  # no room beside two rows; the first, alone, has room for a draft
def test_foresight_takes_the_depth_that_gives_most(most: int, seconds: float) -> None:
    """Of six tokens of the first row drafts may give the first four; of the second's three none."""
    good = np.asarray([[True] * 4 + [False] * 2, [False] * 6])
    found = hindsight.seconds_with_foresight(
        good, np.asarray([6, 3]), most, {2: {0: 1.0, 1: 1.1, 2: 1.2}})
    assert found == pytest.approx(seconds)


def test_rows_share_what_a_round_can_verify() -> None:
    """Three rounds of two tokens each; three for one row at a time would take four."""
    found = hindsight.seconds_with_foresight(
        np.ones((2, 6), bool), np.asarray([6, 6]), 4, {2: {2: 1.0}})
    assert found == pytest.approx(3.0)


def test_the_smallest_batch_that_holds_all_rows_is_paid_for() -> None:
    good = np.zeros((2, 3), bool)
    found = hindsight.seconds_with_foresight(
        good, np.asarray([3, 1]), 4, {1: {0: 0.5}, 4: {0: 2.0, 1: 3.0}})
    assert found == pytest.approx(2.0 + 2 * 0.5)


def test_a_rows_last_token_needs_no_draft() -> None:
    found = hindsight.seconds_with_foresight(
        np.ones((1, 3), bool), np.asarray([3]), 4, {1: {0: 1.0, 1: 1.1, 2: 9.0}})
    assert found == pytest.approx(1.1 + 1)
