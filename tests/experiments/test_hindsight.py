"""Hindsight of the controller benchmark: gains by load, and the ceiling, against sums by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.bench import hindsight
from specrl_jax.control.cost import Table


def result(*launches: tuple[int, int, int, int, float]) -> Any:
    """Of launches with batch, tokens, rows times rounds, rounds, seconds."""
    trace, total = [], np.zeros(3, int)
    for batch, *counts, seconds in launches:
        total = total + counts
        trace.append(dict(zip(hindsight.COUNTS, total.tolist(), strict=True))
                     | {"batch": batch, "seconds": seconds})
    return SimpleNamespace(trace=trace)


def test_gains_are_of_each_batch_size() -> None:
    off = [result((4, 8, 8, 2, 1.0), (2, 6, 6, 3, 1.5)), result((4, 8, 8, 2, 3.0))]
    fast = [result((4, 12, 6, 2, 2.0))]  # two tokens a row and round, as off's rounds take 1 s
    found = hindsight.gains({"off": off, "1x1x2": fast}, ["1x1x2"], [2, 4])
    assert np.isnan(found[0, 0]) and found[1, 0] == pytest.approx(2.0)


def table(rows: int, wide: float, two_steps: float = 0.2) -> Table:
    return Table(packed=np.asarray([rows, 2 * rows], np.float32),
                 nodes=np.asarray([1, 2], np.float32), context=np.asarray([8.0], np.float32),
                 verify=np.asarray([[1.0], [1 + wide]], np.float32),
                 draft=np.asarray([[0.0], [0.1], [two_steps]], np.float32), catch_up=np.float32(0),
                 launch=np.float32(0))


@pytest.mark.parametrize("wide, seconds", [
    (0.0, 1.2 + 1.1 + 1),  # two drafts for the first row, then one, then none
    (9.0, 3 + 1.1 + 1)])  # both rows fill the narrow bucket; the first, alone, has room for a draft
def test_the_ceiling_verifies_what_will_be_accepted(wide: float, seconds: float) -> None:
    """Of six tokens of the first row drafts may give the first four; of the second's three none."""
    commits = np.asarray([[3, 2, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    chain: Any = SimpleNamespace(sequences=SimpleNamespace(
        commits=commits, length=np.asarray([6, 3])))
    assert hindsight._acceptable(chain, 2).tolist() == [
        [True, True, True, True, False, False], [False, False, False, True, True, True]]
    tables = {"2": table(2, wide)}
    assert hindsight.ceiling(chain, 2, tables, 8.0) == pytest.approx(6 / seconds)


def test_the_ceiling_drafts_nothing_for_a_rows_last_token() -> None:
    commits = np.asarray([[3, 0, 0]])
    chain: Any = SimpleNamespace(sequences=SimpleNamespace(
        commits=commits, length=np.asarray([3])))
    found = hindsight.ceiling(chain, 2, {"1": table(1, 0.0, two_steps=5.0)}, 8.0)
    assert found == pytest.approx(3 / (1.1 + 1))
