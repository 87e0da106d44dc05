"""The budget policy keeps what pays most, drafts no deeper than pays, and does not oscillate."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import (
    BUCKETS,
    DEPTH,
    LIMITS,
    alone,
    chains,
    controller,
    drive,
    load,
    made_up,
    random_tree,
    record,
)

from specrl_jax.control import budget, cost_model
from specrl_jax.control.buckets import Bucket
from specrl_jax.control.budget import REPLAN, UNDECIDED, row_weights
from specrl_jax.control.protocol import Controller

SMALL = (Bucket(2, 1), Bucket(2, 2), Bucket(3, 2), Bucket(5, 3))
fill_small = alone(lambda tree, weight, price: budget.fill(tree, weight, jnp.float32(1), price,
                                                           SMALL))


def start(**costs: float) -> Any:
    """The state with made-up costs."""
    return controller("budget").init(made_up(**costs))


@alone
def foreseen(state: Any, of: Any) -> Any:
    """Expected tokens and cost of a round, by depth and bucket."""
    costs = cost_model.at(state.costs, LIMITS, 8, jnp.float32(40))
    return budget.foresee(state.yields, BUCKETS[8], of, costs.verify, costs.draft)


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The controller that never drafts to see whether it pays again."""
    monkeypatch.setattr(budget, "rounds_to_look", lambda *args: jnp.float32(jnp.inf))
    return controller("budget", min_survival=0.01)  # an option it ignores: traced anew


def worth(tree: Any, kept: np.ndarray, weight: np.ndarray) -> float:
    alive = np.asarray(tree.live[:, 0])
    values = np.asarray(tree.survival) * weight[:, None] * kept
    return float(values[:, 1:].sum() + weight[alive].sum())


@pytest.mark.parametrize("seed", range(12))
def test_fill_equals_brute_force(seed: int) -> None:
    """Over all sets of nodes that are closed under parent, in all buckets."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, rows=2, nodes=4)
    weight = rng.uniform(0.5, 2, 2).astype(np.float32)
    price = np.sort(rng.uniform(0, 1.5, len(SMALL))).astype(np.float32)
    alive, parent = np.asarray(tree.live), np.asarray(tree.parent)
    best = -np.inf
    for bits in itertools.product([False, True], repeat=8):
        kept = np.asarray(bits).reshape(2, 4)
        if (kept & ~alive).any() or (kept[:, 0] != alive[:, 0]).any():
            continue
        if (kept & ~np.take_along_axis(kept, parent, 1)).any():
            continue
        for i, bucket in enumerate(SMALL):
            if kept.sum() <= bucket.packed and kept.sum(1).max() <= bucket.nodes:
                best = max(best, worth(tree, kept, weight)
                           - price[i] * weight[alive[:, 0]].sum())
    live, bucket = (np.asarray(a) for a in fill_small(tree, weight * alive[:, 0], price))
    got = worth(tree, live, weight) - price[bucket] * weight[alive[:, 0]].sum()
    assert got == pytest.approx(best, abs=1e-5)
    assert live.sum() <= SMALL[bucket].packed and live.sum(1).max() <= SMALL[bucket].nodes
    assert not (live & ~alive).any() and (live[:, 0] == alive[:, 0]).all()
    assert (np.take_along_axis(live, parent, 1) | ~live).all()


@pytest.mark.parametrize("seed", range(6))
def test_foresee_equals_brute_force(seed: int) -> None:
    """Drafts of known survival, one by one into every bucket, the likeliest first."""
    rng = np.random.default_rng(seed)
    wide, step = rng.uniform(0, 0.4), rng.uniform(0, 0.05)
    state = start(wide=wide, step=step)
    count = rng.integers(0, 3, state.yields.count.shape).astype(np.float32)
    survival = 2.0 ** -(np.arange(count.shape[1]) / 2 + 0.25)
    state = state.replace(yields=state.yields.replace(
        count=count, mass=(count * survival).astype(np.float32), expected=np.float32(10),
        accepted=np.float32(rng.uniform(2, 10))))
    trusted, rounds = (state.yields.accepted + 4) / (10 + 4), []
    for depth in range(DEPTH + 1):
        nodes = -np.sort(-np.repeat(survival, count[:depth].sum(0).astype(int)))
        rounds.append([
            (1 + trusted * nodes[: min(bucket.packed // 8, bucket.nodes) - 1].sum(),
             1 + wide * b + step * depth) for b, bucket in enumerate(BUCKETS[8])])
    tokens, cost = foreseen(state, load())
    np.testing.assert_allclose(tokens, [[r[0] for r in of] for of in rounds], rtol=1e-5)
    np.testing.assert_allclose(cost, [[r[1] for r in of] for of in rounds], rtol=1e-5)
    best = [max(gives / took for gives, took in of) for of in rounds]
    steps = int(alone(controller("budget").plan)(state, load()).spec.depth)
    assert steps == (int(np.argmax(best)) if max(best[1:]) > best[0] else 0)


def test_budget_is_off_when_no_draft_survives() -> None:
    control = controller("budget")
    tree = chains(np.zeros((8, DEPTH)))
    prune = alone(lambda s, of, tree: control.prune(s, control.plan(s, of), of, tree, BUCKETS[8]))
    live, bucket = prune(start(wide=0.0, step=0.0), load(), tree)
    assert int(bucket) == 0 and int(live.sum()) == 8
    state, seen = drive(control, start(), [{"accept": 0.0}] * 60)
    assert [steps for steps, *_ in seen[-20:]].count(0) >= 18, "only looking again may draft"
    assert all(nodes == 8 for _, _, nodes, _ in seen)


def test_row_weights_favour_long_rows_of_small_batches() -> None:
    table = made_up()
    flat, steep = (table.replace(verify=np.asarray([1 + slope * rows for rows in BUCKETS])[
        :, None, None] * np.ones_like(table.verify)) for slope in (0.0, 1e3))
    live = np.asarray([True, True, True, True, False, False, False, False])

    def weigh(costs: Any, left: list[float], strength: float = 1.0, waiting: int = 0) -> Any:
        of = load(live=live, left=[*left, 500, 500, 500, 500], waiting=waiting)
        return np.asarray(row_weights(of, costs, LIMITS, strength))[:4]

    left = [5, 90, 20, 40]
    # The smallest batch has two rows, so a round of two costs as much as one of four.
    np.testing.assert_allclose(weigh(flat, left), [0, 2, 0, 2], atol=1e-5)
    np.testing.assert_allclose(weigh(steep, left), 1, atol=0.35)
    np.testing.assert_allclose(weigh(flat, left, 0.5), [0.5, 1.5, 0.5, 1.5], atol=1e-5)
    np.testing.assert_allclose(weigh(flat, left, 0.0), 1)
    np.testing.assert_array_equal(weigh(flat, left, waiting=3), 1)
    ties = [20, 90, 20, 20]  # any of the three may end last of them
    np.testing.assert_allclose(weigh(flat, ties), [2 / 3, 2, 2 / 3, 2 / 3], atol=1e-5)


def switches(seen: list) -> int:
    on = [steps > 0 for steps, *_ in seen]
    return sum(a != b for a, b in zip(on, on[1:], strict=False))


def jumps(of: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Tables, and two loads of which drafting pays at the second alone, a little."""
    if of == "context":
        return {"wide": 0.24, "step": 0.02, "far": 0.3, "catch_up": 0.01}, [
            {"accept": 0.45, "length": 190}, {"accept": 0.45, "length": 10}]
    return {"wide": 0.5, "step": 0.02, "catch_up": 0.01}, [
        {"accept": 0.4}, {"accept": 0.4, "live": np.arange(8) < 1}]


@pytest.mark.parametrize("hysteresis,most", [(0.25, 2), (0.0, 60)])
@pytest.mark.parametrize("of", ["context", "rows"])
def test_jumping_load_does_not_switch_to_and_fro(
        of: str, hysteresis: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By turns, every 3 rounds. `drive` asserts that nothing compiles.

    Without hysteresis it does oscillate.
    """
    monkeypatch.setattr(budget, "HYSTERESIS", hysteresis)
    control = controller("budget", min_survival=hysteresis)  # an option it ignores: traced anew
    costs, loads = jumps(of)
    state = start(**costs)
    known = state.yields.replace(expected=np.float32(1e4), accepted=np.float32(1e4))
    state = state.replace(yields=known)
    state, _ = drive(control, state, loads[:1] * 40)
    state, seen = drive(control, state, [loads[i // 3 % 2 == 0] for i in range(90)])
    assert (switches(seen) <= most) and (hysteresis > 0 or switches(seen) > 5)


@pytest.mark.parametrize("catch_up, length, drafts", [
    (0.005, 10, True), (0.5, 10, False), (0.0, 190, False)])
def test_rollout_begins_with_drafts_where_they_pay(
        catch_up: float, length: int, drafts: bool, no_looks: Any) -> None:
    """The drafts at the end of the last rollout, of few rows, do not decide that."""
    state, _ = drive(no_looks, start(step=0.02, far=3.0, catch_up=catch_up),
                     [{"accept": 0.9, "length": 10}] * 40)
    state = jax.tree.map(np.asarray, state).replace(drafting=np.int32(1), unread=np.float32(0))
    first = [{"accept": 0.9, "length": length, "left": 9}]
    assert drive(no_looks, state, first)[1][0][0] > 0  # it goes on, at first
    new, _ = no_looks.end_chunk(state, record(last=True))
    assert int(new.drafting) == UNDECIDED
    assert np.array_equal(new.yields.mass, state.yields.mass)
    assert (drive(no_looks, new, first)[1][0][0] > 0) == drafts


@pytest.mark.parametrize("catch_up, unread, undecided", [(0.1, 8, False), (0.02, 64, True)])
def test_long_lived_plan_decides_as_one_for_each_round(
        catch_up: float, unread: int, undecided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a constant advantage drafting begins in the same round: a plan stands until it may."""
    monkeypatch.setattr(budget, "rounds_to_look", lambda *args: jnp.float32(jnp.inf))
    began, regret = {}, {}
    for hysteresis in (0.25, 100.0):
        monkeypatch.setattr(budget, "HYSTERESIS", hysteresis)
        control = controller("budget", min_survival=0.02 + hysteresis / 1000)  # traced anew
        for valid_for in (1, REPLAN):
            state = start(step=0.02, far=3.0, catch_up=catch_up)
            state, _ = drive(control, state, [{"accept": 0.9, "length": 190}] * 140, valid_for)
            state = jax.tree.map(np.asarray, state)
            assert state.drafting == 0 and state.regret < 0.1
            state = state.replace(unread=np.float32(unread), drafting=np.int32(
                UNDECIDED if undecided else 0))
            loads = [{"accept": 0.9, "length": 64}] * 40
            loads[0] = loads[0] | {"left": 9}  # where it is undecided, it begins without drafts
            state, seen = drive(control, state, loads, valid_for)
            if hysteresis == 100.0:
                regret[valid_for] = float(state.regret)
            else:
                began[valid_for] = [steps > 0 for steps, *_ in seen].index(True)
    assert 1 < began[1] == began[REPLAN]
    assert regret[REPLAN] == pytest.approx(regret[1], rel=1e-4) and regret[1] > 1


def test_drafter_that_becomes_good_is_noticed() -> None:
    control = controller("budget")
    state, _ = drive(control, start(step=0.01), [{"accept": 0.0}] * 60)
    assert int(state.drafting) == 0
    _, seen = drive(control, state, [{"accept": 0.9}] * 200)
    assert seen[-1][0] > 1


@pytest.mark.parametrize("accept", [0.0, 0.4, 0.7, 1.0])
def test_budget_is_hardly_slower_than_best_constant_depth(accept: float) -> None:
    """Rows end one after another, over and over: many want no drafts where few want deep ones."""
    control = controller("budget")

    def held(depth: int) -> Any:
        def plan(state: Any, of: Any) -> Any:
            free = control.plan(state, of)
            return free.replace(spec=free.spec.replace(depth=jnp.int32(depth)))

        return control._replace(plan=plan, prune=Controller._field_defaults["prune"])

    took = [time_of(held(depth), start(wide=0.45, step=0.02), accept) for depth in range(5)]
    assert time_of(control, start(wide=0.45, step=0.02), accept) <= 1.01 * min(took)


def time_of(control: Any, state: Any, accept: float) -> float:
    """Plain rounds, expected by the table: 8 rows generate 30 tokens, 4 another 30, and one 60."""
    phases = {8: 30, 4: 30, 1: 60}  # rounds of each, drafted or not; the tokens are made equal
    seconds, tokens = dict.fromkeys(phases, 0.0), dict.fromkeys(phases, 0.0)
    for turn in range(4):
        for rows, rounds in phases.items():
            before = np.asarray(state.spent)
            one = {"accept": accept, "live": np.arange(8) < rows}
            state, seen = drive(control, state, [one] * rounds)
            if turn:  # it has learned what drafts give
                seconds[rows] += (np.asarray(state.spent) - before)[:-1].sum()
                tokens[rows] += sum((verified[:rows] * accept ** np.arange(DEPTH + 1)).sum()
                                    for *_, verified in seen)
    return sum(rows * rounds * seconds[rows] / tokens[rows] for rows, rounds in phases.items())


def test_end_chunk_reports_what_the_rounds_were_to_cost() -> None:
    control = controller("budget", cost_updates="off")
    state, seen = drive(control, start(wide=0.1, step=0.0), [{"accept": 0.9}] * 10)
    buckets, tokens = [bucket for _, bucket, *_ in seen], 137
    after, report = control.end_chunk(jax.tree.map(np.asarray, state), record(
        12.0, rounds=10, row_rounds=80, committed=tokens))
    assert report == {
        "predicted_seconds": pytest.approx(sum(1 + 0.1 * b for b in buckets), rel=1e-4),
        "plain_seconds": pytest.approx(tokens / 8, rel=1e-4),
        "speculation_seconds": pytest.approx(sum(0.1 * b for b in buckets), rel=1e-4)}
    assert not after.spent.any() and after.costs.pace == 0
