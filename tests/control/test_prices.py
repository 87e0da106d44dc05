"""Errors of prices, told apart from the pace of the machine."""

import jax
import numpy as np
import pytest
from control_cases import LADDERS, controller, drive, priced

from specrl_jax.control import prices
from specrl_jax.control.prices import Prices

EIGHT = slice(4, 8)  # three buckets and drafts; those of two rows come first
BUCKETS = np.eye(4)


def launches(known: Prices, truth: np.ndarray, table: np.ndarray, pace: float, times: int = 1
             ) -> Prices:
    """Launches of eight rows that take what `truth` says, in logarithms, over `table` seconds."""
    for _ in range(times):
        took = (table * np.exp(truth)).sum() * np.exp(pace)
        known = prices.learn(known, "8", table * known.factor["8"], 0.0, took)
    return known


def test_a_pace_is_no_error_of_a_price() -> None:
    known = prices.blank(LADDERS)
    for i in range(60):
        known = launches(known, np.zeros(4), BUCKETS[i % 3], 0.3)
    assert known.mean[0] == pytest.approx(0.3, abs=0.02)
    np.testing.assert_allclose(known.mean[1:], 0, atol=0.02)


def test_prices_are_told_apart_once_others_are_seen() -> None:
    """16 tokens take 16 % more than their price; a part is charged at once, all with 32 seen."""
    truth, known = np.asarray([0.0, 0.16, 0.0, 0.0]), prices.blank(LADDERS)
    for i in range(10):
        known = launches(known, truth, BUCKETS[i % 2 * 2], 0.0)  # narrow and wide
    known = launches(known, truth, BUCKETS[1], 0.0)
    low, middle, high = known.mean[EIGHT][:3]
    assert middle - max(low, high) > 0.05
    for i in range(60):
        known = launches(known, truth, BUCKETS[i % 3], 0.1 * np.sin(i / 20))
    low, middle, high = known.mean[EIGHT][:3]
    assert middle - low == pytest.approx(0.16, abs=0.03) and abs(low - high) < 0.03


def test_one_spoilt_launch_says_little() -> None:
    known = prices.blank(LADDERS)
    for i in range(30):
        known = launches(known, np.zeros(4), BUCKETS[i % 3], 0.0)
    spoilt = launches(known, np.zeros(4), BUCKETS[1], 1.5)
    assert np.abs(spoilt.mean - known.mean).max() < 0.1


def test_one_bucket_alone_tells_nothing_of_prices_and_hope_is_for_the_others() -> None:
    """A slow bucket and a slow machine are the same to see."""
    known = launches(prices.blank(LADDERS), np.zeros(4), BUCKETS[0], 0.2, 7 * prices.HOPE - 2)
    np.testing.assert_allclose(hoped(known), 0, atol=1e-6)
    known = launches(known, np.zeros(4), BUCKETS[0], 0.2)
    assert known.mean[0] + known.mean[EIGHT][0] == pytest.approx(0.2, abs=0.02)
    np.testing.assert_allclose(np.sqrt(np.diag(known.cov))[1:], prices.PRICE, rtol=0.02)
    np.testing.assert_allclose(hoped(known)[[0, 3]], 0, atol=1e-6)
    np.testing.assert_allclose(hoped(known)[1:3], -prices.PRICE * 2**0.5, rtol=0.02)
    for i in range(3 * prices.HOPE):
        known = launches(known, np.zeros(4), BUCKETS[i % 2], 0.2)
    assert hoped(known)[2] < 2 * hoped(known)[0] < 0, "what is known needs less hope"


def hoped(known: Prices) -> np.ndarray:
    """What the next launch takes off the logarithms of prices."""
    return np.log(known.factor["8"]) - known.mean[EIGHT]


@pytest.mark.parametrize("really, best", [((1.0, 1.45, 2.55), 2), ((1.0, 1.25, 2.75), 1)])
def test_budget_tries_a_bucket_that_its_table_may_price_wrongly(
        really: tuple[float, ...], best: int) -> None:
    """By the table 16 tokens are worth 8 % more than 32."""
    control = controller("budget")
    state = priced(control.init())
    table = state.tables["8"]
    verify = np.broadcast_to(np.asarray([[1.0], [1.25], [2.55]], np.float32), table.verify.shape)
    state = state.replace(tables=state.tables | {"8": table.replace(verify=verify)})
    used = []
    for _ in range(20):
        state = jax.tree.map(np.asarray, control.start(state))
        state, seen = drive(control, state, [{"accept": 0.95}] * 16)
        buckets = [bucket for _, bucket, *_ in seen]
        seconds = sum(really[bucket] for bucket in buckets) + 0.02 * sum(s for s, *_ in seen)
        state = control.update(state, {"batch": 8, "seconds": seconds})
        used.append(np.bincount(buckets, minlength=3) / len(buckets))
    assert used[0][1] == 1, "as the table says"
    assert np.mean(used, 0)[best] > 0.85 and np.mean(used[-4:], 0)[best] == 1
