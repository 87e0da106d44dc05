"""Errors of prices, told apart from the pace of the machine."""

import jax
import numpy as np
import pytest
from control_cases import ADAPTIVE, controller, drive, priced

from specrl_jax.control import adaptive, prices
from specrl_jax.control.cost_model import Table
from specrl_jax.control.prices import EARLY, PRICE, TRIALS, Prices

ONE = np.eye(4)  # of three buckets and drafts
GRID = np.float32([32, 200])


def table(verify: tuple[float, ...] = (1.0, 2.0, 4.0)) -> Table:
    return Table(packed=np.float32([8, 16, 32]), nodes=np.float32([1, 5, 5]), context=GRID,
                 verify=np.outer(verify, [1.0, 1.5]).astype(np.float32),
                 draft=np.full((5, 2), 0.1, np.float32), catch_up=np.float32(0.5),
                 launch=np.float32(0))


def rollout(known: Prices, truth: np.ndarray, spent: np.ndarray, pace: float = 0.0,
            besides: float = 0.0) -> Prices:
    """Takes what `truth` says, in logarithms, over the measured prices of `spent`."""
    took = ((spent * np.exp(truth)).sum() + besides) * np.exp(pace)
    believed = spent * np.exp(errors(known)[1:])
    return prices.learn(known, taken(known), believed, besides, took)[0]


def taken(known: Prices) -> Table:
    """The table that the next rollout takes."""
    new = table()
    buckets, drafts = known.taken[:-1, None], known.taken[-1]
    return new.replace(verify=new.verify * buckets, draft=new.draft * drafts,
                       catch_up=new.catch_up * drafts)


def errors(known: Prices) -> np.ndarray:
    """f32[n] means: of the pace, and of prices."""
    return known.known[:, 0]


def doubts(known: Prices) -> np.ndarray:
    """f32[n - 1] what the next rollout takes off the logarithms of prices."""
    return np.log(prices.doubted(known))


def test_a_pace_is_no_error_of_a_price() -> None:
    known = prices.blank(3)
    for i in range(60):
        known = rollout(known, np.zeros(4), ONE[i % 3], 0.3, besides=0.2)
    assert errors(known)[0] == pytest.approx(0.3, abs=0.02)
    np.testing.assert_allclose(errors(known)[1:], 0, atol=0.02)


def test_prices_are_told_apart_once_others_are_paid() -> None:
    """16 tokens take 16 % more than their price; a part is charged at once, all with 32 seen."""
    truth, known = np.asarray([0.0, 0.16, 0.0, 0.0]), prices.blank(3)
    for i in range(10):
        known = rollout(known, truth, ONE[i % 2 * 2])  # narrow and wide
    known = rollout(known, truth, ONE[1])
    low, middle, high = errors(known)[1:4]
    assert middle - max(low, high) > 0.05
    for i in range(60):
        known = rollout(known, truth, ONE[i % 3], 0.1 * np.sin(i / 20))
    low, middle, high = errors(known)[1:4]
    assert middle - low == pytest.approx(0.16, abs=0.03) and abs(low - high) < 0.03
    np.testing.assert_allclose(known.taken, np.exp(errors(known)[1:]), rtol=1e-5)


def test_a_price_that_changes_is_learned_anew() -> None:
    known = prices.blank(3)
    for i in range(200):
        known = rollout(known, np.asarray([0.0, 0.0 if i < 60 else 0.1, 0.0, 0.0]), ONE[i % 2])
        if i == 59:
            assert abs(errors(known)[2] - errors(known)[1]) < 0.01
    assert errors(known)[2] - errors(known)[1] == pytest.approx(0.1, abs=0.01)
    assert np.diag(known.known[:, 1:])[1:].max() <= PRICE**2 * (1 + 1e-5)


def test_of_a_few_milliseconds_little_is_learned() -> None:
    truth, known = np.asarray([0.0, 0.2, 0.0, 0.0]), prices.blank(3)
    for i in range(20):
        known = rollout(known, 0 * truth, ONE[i % 3])
    long, short = (errors(rollout(known, truth, seconds * ONE[1]))[2] for seconds in (1.0, 0.005))
    assert 0 < 3 * short < long


def test_one_spoilt_rollout_says_little() -> None:
    known = prices.blank(3)
    for i in range(30):
        known = rollout(known, np.zeros(4), ONE[i % 3])
    spoilt = rollout(known, np.zeros(4), ONE[1], 1.5)
    assert np.abs(errors(spoilt) - errors(known)).max() < 0.1


def test_one_bucket_alone_tells_nothing_of_prices_and_doubt_is_about_the_others() -> None:
    """A slow bucket and a slow machine are the same to see."""
    known, tried = prices.blank(3), []
    for i in range(1, 2 * TRIALS):
        known = rollout(known, np.zeros(4), ONE[0], 0.2)
        assert prices.trial(known) == bool(np.abs(doubts(known)).max() > 1e-3)
        tried += [i + 1] * prices.trial(known)
    assert tried == [*(i + 1 for i in EARLY), TRIALS, 2 * TRIALS] and len(EARLY) == 3
    assert errors(known)[:2].sum() == pytest.approx(0.2, abs=0.02)
    np.testing.assert_allclose(errors(known)[2:], 0, atol=1e-6)
    np.testing.assert_allclose(doubts(known), [0, 2**0.5 * PRICE, 2**0.5 * PRICE, 0],
                               rtol=0.02, atol=1e-6)
    for i in range(2 * TRIALS):
        known = rollout(known, np.zeros(4), ONE[i % 2], 0.2)
    known = known.replace(rollouts=np.int32(TRIALS - 2))
    known = rollout(known, np.zeros(4), ONE[0], 0.2)
    assert 0 < 2 * doubts(known)[1] < doubts(known)[2], "what is known is doubted less"


def test_of_nothing_foreseen_nothing_is_learned() -> None:
    known = rollout(prices.blank(3), np.zeros(4), ONE[0])
    for spent, took in ((0 * ONE[0], 1.0), (ONE[0], 0.0)):
        same, unchanged = prices.learn(known, taken(known), spent, 0.1, took)
        assert same is known and (unchanged.verify == taken(known).verify).all()


def test_a_trial_makes_no_bucket_cheaper_than_a_smaller_one() -> None:
    """Else it would be filled with drafts, whatever these give."""
    near, known = table((1.0, 1.02, 1.03)), prices.blank(3)
    near.verify[1:, 1] *= 1.2  # at the longer context a larger one may be taken for cheaper
    known, tried = prices.learn(known, near, ONE[0], 0.0, 1.0)
    assert prices.trial(known)
    np.testing.assert_allclose(tried.verify[1:, 0], tried.verify[0, 0], rtol=1e-6)
    assert (np.diff(tried.verify, axis=0) > -1e-6).all()
    np.testing.assert_allclose(prices.measured(known, tried).verify, near.verify, rtol=1e-6)
    _, usual = prices.learn(known, tried, ONE[0], 0.0, 1.0)
    np.testing.assert_allclose(usual.verify, near.verify, rtol=1e-3)


def test_what_was_learned_stands_while_the_table_is_the_same() -> None:
    known, now = prices.learn(prices.blank(3), table(), ONE[1], 0.0, 2.5)
    same, kept = prices.renewed(known, now, table())
    assert same is known and kept is now
    for new in (table((1.0, 2.1, 4.0)), table().replace(draft=np.full((5, 2), 0.2, np.float32)),
                table().replace(catch_up=np.float32(0.6))):
        blank, other = prices.renewed(known, now, new)
        assert other is new and blank.rollouts == 0 and (blank.taken == 1).all()


def rollouts(really: tuple[float, ...], times: int, **options: str) -> tuple[list, object]:
    """Rollouts of 16 rounds of 8 rows, whose buckets take `really`. By the table, 16 tokens are
    worth 8 % more than 32.

    Returns:
      shares f64[buckets] of rounds in each rollout, and the state.
    """
    control = controller("budget", **options)
    state = priced(control.init())
    eight = state.tables["8"]
    verify = np.broadcast_to(np.asarray([[1.0], [1.25], [2.55]], np.float32), eight.verify.shape)
    state, used = state.replace(tables=state.tables | {"8": eight.replace(verify=verify)}), []
    for _ in range(times):
        state = jax.tree.map(np.asarray, control.start(control.begin(state, 0)))
        state, seen = drive(control, state, [{"accept": 0.95}] * 16)
        buckets = [bucket for _, bucket, *_ in seen]
        launch = {"batch": 8, "seconds": sum(really[b] for b in buckets)
                  + 0.02 * sum(steps for steps, *_ in seen)}
        state = jax.tree.map(np.asarray, state)
        launch |= control.explain(state, launch)
        assert launch["trial"] == (len(used) in (1, 3, 7, 15)) * (options.get("clock") != "frozen")
        price = np.asarray([1.0, 1.25, 2.55, 0.02]) * np.exp(errors(state.prices["8"])[1:])
        foreseen = price[buckets].sum() + price[3] * sum(steps for steps, *_ in seen)
        assert launch["predicted_seconds"] == pytest.approx(state.factor * foreseen, rel=1e-4), (
            "as believed, in a trial too")
        assert launch["spent_seconds"] == pytest.approx(
            state.factor * (foreseen - 16 * price[0]), rel=1e-4)
        assert launch["off_seconds"] == pytest.approx(
            state.factor * price[0] * launch["tokens"] / 8, rel=1e-4)
        state = control.end(control.update(state, launch), [launch], [])
        used.append(np.bincount(buckets, minlength=3) / len(buckets))
    return used, state


@pytest.mark.parametrize("really, best", [((1.0, 1.45, 2.55), 2), ((1.0, 1.25, 2.75), 1)])
def test_budget_tries_a_bucket_that_its_table_may_price_wrongly(
        really: tuple[float, ...], best: int) -> None:
    used, _ = rollouts(really, 20)
    assert used[0][1] == 1, "as the table says"
    assert used[1][2] > 0.5, "and then the other"
    assert np.mean(used, 0)[best] > 0.85 and np.mean(used[-4:], 0)[best] == 1


def test_launches_of_a_batch_size_are_learned_together() -> None:
    """Two sizes, of two launches each, that take 1.5 times what is foreseen, launches too."""
    state = priced(controller("budget").init())
    state = state.replace(tables={size: t.replace(launch=np.float32(0.25))
                                  for size, t in state.tables.items()})
    trace = [{"batch": batch, "spent": [scale, *[0.0] * (2 if batch == 8 else 1), 0.25],
              "seconds": 1.5 * (scale + 0.5)} for batch, scale in ((8, 1), (8, 2), (2, 3), (2, 5))]
    after = adaptive.learned(state, trace)
    for size in ("8", "2"):
        pace, *of_prices = errors(after.prices[size])
        seen = np.asarray([pace, *of_prices])
        assert seen.sum() == pytest.approx(np.log(1.5), rel=0.1)
    assert after.prices["64"].rollouts == 0
    exact = [launch | {"seconds": launch["seconds"] / 1.5} for launch in trace]
    for size, known in adaptive.learned(state, exact).prices.items():
        np.testing.assert_allclose(errors(known), 0, atol=1e-6, err_msg=size)


def test_a_frozen_clock_learns_no_price() -> None:
    used, state = rollouts((1.0, 1.45, 2.55), 4, clock="frozen")
    assert np.mean(used, 0)[1] == 1
    jax.tree.map(np.testing.assert_array_equal, state.prices["8"], prices.blank(3))


def test_other_policies_and_forced_depths_learn_no_price() -> None:
    launch = {"batch": 8, "seconds": 9.0, "spent": [1.0, 2.0, 3.0, 0.5]}
    ran = dict.fromkeys(("launch_rounds", "tokens", "live", "drafting", "context"), 1.0) | launch
    for policy in ADAPTIVE:
        control = controller(policy)
        for depth in (None, 2):
            state = control.depth(priced(control.init()), depth)
            ended = control.end(state, [ran], [])
            assert ended.prices["8"].rollouts == (policy == "budget" and depth is None)
            assert ended.prices["2"].rollouts == 0 and ended.tables["2"] is state.tables["2"]
