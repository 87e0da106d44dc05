"""The budget policy keeps what pays most, drafts no deeper than pays, and does not oscillate."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import (
    DEPTH,
    LADDER,
    LADDERS,
    NODES,
    alone,
    chains,
    controller,
    drive,
    load,
    priced,
    random_tree,
)

from specrl_jax.config import ControlConfig
from specrl_jax.control import adaptive, budget
from specrl_jax.control.adaptive import SUMS
from specrl_jax.control.cost_model import Bucket

SMALL = (Bucket(2, 1), Bucket(2, 2), Bucket(3, 2), Bucket(5, 3))
fill = alone(lambda tree, of, price: budget.fill(tree, of, jnp.float32(1), price, LADDER))
fill_small = alone(lambda tree, of, price: budget.fill(tree, of, jnp.float32(1), price, SMALL))


def worth(tree: Any, kept: np.ndarray, weight: np.ndarray) -> float:
    alive = np.asarray(tree.live[:, 0])
    values = np.asarray(tree.survival) * weight[:, None] * kept
    return float(values[:, 1:].sum() + weight[alive].sum())


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_equals_brute_force(seed: int) -> None:
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
    of = load(2, live=alive[:, 0], weight=weight)
    live, bucket = (np.asarray(a) for a in fill_small(tree, of, price))
    got = worth(tree, live, weight) - price[bucket] * weight[alive[:, 0]].sum()
    assert got == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_the_worth_of_a_depth_equals_brute_force(seed: int) -> None:
    """Drafts of known survival, one by one into every bucket, the likeliest first."""
    control, rng = controller("budget"), np.random.default_rng(seed)
    state = priced(control.init(), wide=rng.uniform(0, 0.4), step=rng.uniform(0, 0.05))
    count = rng.integers(0, 3, state.harvest.count.shape).astype(np.float32)
    survival = 2.0 ** -(np.arange(count.shape[1]) / 2 + 0.25)
    state = state.replace(harvest=state.harvest.replace(
        count=count, mass=(count * survival).astype(np.float32), promised=np.float32(10),
        accepted=np.float32(rng.uniform(2, 10))))
    believed = (state.harvest.accepted + 4) / (10 + 4)
    table, rounds = state.tables["8"], []
    for depth in range(DEPTH + 1):
        nodes = np.repeat(survival, count[:depth].sum(0).astype(int))
        nodes = -np.sort(-nodes)
        rounds.append([
            (1 + believed * nodes[: min(bucket.packed // 8, bucket.nodes) - 1].sum(),
             table.verify[b, 0] + table.draft[depth, 0]) for b, bucket in enumerate(LADDERS[8])])
    tokens, takes = alone(lambda s, of: budget.foresee(s, s.tables["8"], of))(state, load())
    np.testing.assert_allclose(tokens, [[r[0] for r in of] for of in rounds], rtol=1e-5)
    np.testing.assert_allclose(takes, [[r[1] for r in of] for of in rounds], rtol=1e-5)
    best = [max(gives / took for gives, took in of) for of in rounds]
    steps = int(alone(control.plan)(state, load()).steps)
    assert steps == (int(np.argmax(best)) if max(best[1:]) > best[0] else 0)


def test_a_draft_that_ends_all_rows_saves_a_round() -> None:
    """One draft a row takes 0.6 plain rounds, for which rounds of three bring 0.99 tokens. Where
    rows have room for two tokens, another round would follow for the second."""
    control = controller("budget")
    state, seen = drive(control, priced(control.init(), wide=0.6), [{"accept": 0.95}] * 20)
    assert seen[-1][:2] == (3, 2)
    tree = chains(0.95 * np.ones((8, DEPTH)), steps=1)
    spec = alone(control.plan)(state, load())
    keep = alone(lambda s, of: control.keep(s, of, spec, tree, LADDERS[8])[1])
    assert [int(keep(state, load(room=room))) for room in (9, 2)] == [0, 1]
    for room in (2, [1, 3] * 4):
        tokens, _ = alone(lambda s, of: budget.foresee(s, s.tables["8"], of))(
            state, load(room=room))
        assert np.asarray(tokens).max() == 2


@pytest.mark.parametrize("seed", range(30))
def test_it_never_leaves_the_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    price = np.sort(rng.uniform(0, 3, len(LADDER))).astype(np.float32)
    of = load(4, live=tree.live[:, 0], weight=rng.uniform(0, 3, 4))
    live, bucket = (np.asarray(a) for a in fill(tree, of, price))
    assert 0 <= bucket < len(LADDER)
    assert live.sum() <= LADDER[bucket].packed and live.sum(1).max() <= LADDER[bucket].nodes
    assert not (live & ~np.asarray(tree.live)).any()
    np.testing.assert_array_equal(live[:, 0], tree.live[:, 0])
    assert (np.take_along_axis(live, np.asarray(tree.parent), 1) | ~live).all()
    more = (np.asarray(tree.live) & ~live).sum()
    if bucket == len(LADDER) - 1:  # as many nodes a row as there are: filled, or nothing is left
        assert more == 0 or live.sum() == LADDER[bucket].packed


def test_it_is_off_when_no_draft_survives() -> None:
    control = controller("budget")
    state = priced(control.init(), wide=0.0, step=0.0)
    tree = chains(np.zeros((8, DEPTH)))
    keep = alone(lambda s, of, tree: control.keep(s, of, control.plan(s, of), tree, LADDERS[8]))
    live, bucket = keep(state, load(), tree)
    assert int(bucket) == 0 and int(live.sum()) == 8
    state, seen = drive(control, priced(control.init()), [{"accept": 0.0}] * 60)
    assert [steps for steps, *_ in seen[-20:]].count(0) >= 18, "only looking again may draft"
    assert all(nodes == 8 for _, _, nodes, _ in seen)


def test_good_drafts_are_drafted_deep_and_poor_ones_less() -> None:
    depths = {}
    for accept in (0.98, 0.1):
        control = controller("budget")
        _, seen = drive(control, priced(control.init(), step=0.05), [{"accept": accept}] * 40)
        depths[accept] = np.mean([steps for steps, *_ in seen[-10:]])
    assert depths[0.98] == 3 and depths[0.1] < 0.5  # 32 tokens hold 3 drafts of 8 rows


def test_long_rows_come_first_when_they_weigh_more() -> None:
    tree = chains(np.full((4, 4), 0.5) ** np.arange(1, 5))
    price = np.asarray([1, 1, 1.01, 2, 3], np.float32)
    even = np.asarray(alone(lambda t, of, p: budget.fill(t, of, jnp.float32(1), p, LADDER))(
        tree, load(4), price)[0])
    long = np.asarray(alone(lambda t, of, p: budget.fill(t, of, jnp.float32(1), p, LADDER))(
        tree, load(4, weight=[3, 0.3, 0.3, 0.4]), price)[0])
    assert even.sum(1).tolist() == [2, 2, 2, 2] and long.sum() == 8 and long[0].sum() > 2


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
def test_a_load_that_jumps_across_a_threshold_does_not_oscillate(
        of: str, hysteresis: float, most: int) -> None:
    """By turns, every 3 rounds. `drive` asserts that nothing compiles.

    Without hysteresis it does oscillate.
    """
    control = controller("budget", hysteresis=hysteresis)
    tables, loads = jumps(of)
    state = priced(control.init(), **tables)
    known = state.harvest.replace(promised=np.float32(1e4), accepted=np.float32(1e4))
    state = state.replace(harvest=known)
    state, _ = drive(control, state, loads[:1] * 40)
    state, seen = drive(control, state, [loads[i // 3 % 2 == 0] for i in range(90)])
    assert (switches(seen) <= most) and (hysteresis > 0 or switches(seen) > 5)


def test_a_load_that_jumps_and_stays_is_followed() -> None:
    """One row drafts for next to nothing; to verify drafts of eight costs more than they give.

    They are never verified then, and drafted for no longer than hysteresis allows.
    """
    control = controller("budget")
    state = priced(control.init(), wide=1.2, step=0.02)
    eight, one = {"accept": 0.8}, {"accept": 0.8, "live": np.arange(8) < 1}
    state, _ = drive(control, state, [one] * 40)
    _, seen = drive(control, state, ([eight] * 30 + [one] * 30) * 3)
    steps, bucket = (np.asarray(a).reshape(3, 2, 30) for a in list(zip(*seen, strict=True))[:2])
    assert not bucket[:, 0].any() and (bucket[:, 1] > 0).mean() > 0.95
    assert (0.02 * steps[:, 0].sum(1) < 0.3).all()  # of a plain round, 0.25 of it hysteresis


def test_switching_on_waits_until_it_pays_for_catching_up() -> None:
    began = {}
    for catch_up in (0.0, 0.5):
        control = controller("budget", explore=0.0)
        state = priced(control.init(), step=0.02, far=3.0, catch_up=catch_up)
        state, _ = drive(control, state, [{"accept": 0.9, "length": 190}] * 40)
        assert int(state.steps) == 0
        _, seen = drive(control, state, [{"accept": 0.9, "length": 10}] * 80)
        began[catch_up] = [steps > 0 for steps, *_ in seen].index(True)
    assert began[0.0] <= 3 < began[0.5]


@pytest.mark.parametrize("catch_up", [0.0, 0.02])
def test_it_does_not_switch_on_for_what_is_too_short_to_pay_for_catching_up(catch_up: float
                                                                           ) -> None:
    """40 missed rounds take 0.8 plain ones, and a round with drafts saves about 2."""
    control = controller("budget", explore=0.0)
    state = priced(control.init(), step=0.02, far=3.0, catch_up=catch_up)
    state, _ = drive(control, state, [{"accept": 0.9, "length": 190}] * 40)
    began = {}
    for left in (1, 3, 100):
        _, seen = drive(control, state, [{"accept": 0.9, "length": 10, "left": left}] * 20)
        began[left] = any(steps for steps, *_ in seen)
    assert began == {1: not catch_up, 3: not catch_up, 100: True}


@pytest.mark.parametrize("catch_up, length, drafts", [
    (0.005, 10, True), (0.05, 10, False), (0.0, 190, False)])
def test_a_rollout_begins_with_drafts_where_they_pay_for_its_prompts(
        catch_up: float, length: int, drafts: bool) -> None:
    """What was drafted at the end of the last one, by few rows, says nothing of that."""
    control = controller("budget", explore=0.0)
    state, _ = drive(control, priced(control.init(), step=0.02, far=3.0, catch_up=catch_up),
                     [{"accept": 0.9, "length": 10}] * 40)
    first = [{"accept": 0.9, "length": length, "left": 9}]
    assert drive(control, state, first)[1][0][0] > 0  # it goes on, at first
    new = control.begin(jax.tree.map(np.asarray, state), 100)
    assert int(new.own.drafting) == adaptive.FREE and new.missed == 100
    assert np.array_equal(new.harvest.mass, state.harvest.mass)
    assert (drive(control, new, first)[1][0][0] > 0) == drafts


@pytest.mark.parametrize("catch_up, missed, undecided", [
    (0.0, 8, False), (0.02, 8, False), (0.1, 8, False), (0.02, 60, True), (0.1, 8, True)])
def test_a_plan_that_stands_for_rounds_decides_as_one_for_each(
        catch_up: float, missed: int, undecided: bool) -> None:
    """For a constant advantage, drafting begins in the same round: a plan stands until it may."""
    began, regret = {}, {}
    for hold in (1, adaptive.HOLD):
        for hysteresis in (0.25, 100.0):
            control = controller("budget", explore=0.0, hysteresis=hysteresis)
            state = priced(control.init(), step=0.02, far=3.0, catch_up=catch_up)
            state, _ = drive(control, state, [{"accept": 0.9, "length": 190}] * 140, hold)
            state = jax.tree.map(np.asarray, state)
            assert state.own.drafting == 0 and state.own.regret < 0.1
            own = state.own.replace(drafting=np.int32(adaptive.FREE)) if undecided else state.own
            state = state.replace(missed=np.float32(missed), own=own)
            loads = [{"accept": 0.9, "length": 50}] * 40
            loads[0] = loads[0] | {"left": 9}  # where it is undecided, it begins without drafts
            state, seen = drive(control, state, loads, hold)
            if hysteresis == 100.0:
                regret[hold] = float(state.own.regret)
            else:
                began[hold] = [steps > 0 for steps, *_ in seen].index(True)
    assert 1 < began[1] == began[adaptive.HOLD]
    assert regret[adaptive.HOLD] == pytest.approx(regret[1], rel=1e-4) and regret[1] > 1


def test_a_drafter_that_becomes_good_is_noticed() -> None:
    control = controller("budget")
    state, _ = drive(control, priced(control.init(), step=0.01), [{"accept": 0.0}] * 60)
    assert int(state.own.drafting) == 0
    _, seen = drive(control, state, [{"accept": 0.9}] * 200)
    assert seen[-1][0] > 1


EXPLORE = pytest.mark.parametrize("explore", [0.01, ControlConfig().explore])


@EXPLORE
def test_looking_again_takes_its_share_and_no_more(explore: float) -> None:
    control, looks = controller("budget", explore=explore), {}
    for hold in (1, adaptive.HOLD):
        state = priced(control.init(), step=0.1005, catch_up=0.002)
        _, seen = drive(control, state, [{"accept": 0.0}] * 300, hold)
        looks[hold] = [i for i, (steps, *_) in enumerate(seen[20:]) if steps > 0]
    assert looks[1] == looks[adaptive.HOLD], "a plan that stands makes none of them late"
    takes = 0.1005 + 0.002 * np.diff(looks[1])
    assert (takes <= explore * np.diff(looks[1])).all()
    assert len(takes) >= 280 // (3 + 0.1005 / (explore - 0.002)) - 1


@EXPLORE
def test_a_rollout_of_long_prompts_does_not_begin_with_a_look_that_rounds_have_not_paid(
        explore: float) -> None:
    """To look is to read the prompt first. Rounds of earlier rollouts pay, too."""
    control = controller("budget", explore=explore)
    state = priced(control.init(), step=0.02, wide=2.0, catch_up=0.005)
    first, spent = [], 0.0
    for _ in range(12):
        state = control.begin(jax.tree.map(np.asarray, state), 100)
        state, seen = drive(control, state, [{"accept": 0.0}] * 32)
        looks = [i for i, (steps, *_) in enumerate(seen) if steps > 0]
        first.append(looks[0] if looks else None)
        spent += len(looks) * 0.02 + 0.005 * (100 + looks[-1] if looks else 0)
    assert first[0] is None and 0 in first
    assert spent <= explore * 12 * 32


def test_a_look_is_not_the_depth_that_was_drafted_last() -> None:
    """Else its advantage, not that of the best depth, would count for as long as a plan stands."""
    control = ControlConfig()
    choose = alone(lambda s, of: budget.choose_depth(s, s.tables["8"], of, control))
    made = controller("budget").init()
    for step in np.linspace(0.2, 0.5, 31):
        state = priced(made, wide=0.0, step=step)
        state = state.replace(own=state.own.replace(drafting=np.int32(0)))
        plain, looked = (choose(state.replace(steps=np.int32(steps)), load()) for steps in (0, 1))
        jax.tree.map(np.testing.assert_array_equal, plain, looked)


def test_bounds_of_the_plan() -> None:
    control = controller("budget")
    plan = alone(control.plan)
    for length in (1, 500):
        spec = plan(priced(control.init(), step=0.0, wide=0.0), load(length=length))
        assert 0 <= int(spec.steps) <= DEPTH and int(spec.nodes) == NODES
    wide = load(64)
    assert int(plan(priced(control.init()), wide).steps) == 0  # one bucket: nothing to draft for


def test_a_depth_that_was_never_drafted_is_tried_when_shallower_drafts_survive() -> None:
    """One draft a row pays at first sight; all are accepted, and then the deepest pays most."""
    control = controller("budget")
    state = priced(control.init(), wide=0.35, step=0.01)
    poor = state.replace(harvest=state.harvest.replace(
        count=np.minimum(state.harvest.count, 1) * np.float32([1, 0, 0, 0])[:, None],
        mass=state.harvest.mass * np.float32([1, 0, 0, 0])[:, None]))
    _, seen = drive(control, poor, [{"accept": 1.0}] * 12)
    assert seen[0][0] == 1 and [steps for steps, *_ in seen[-5:]] == [3] * 5


@pytest.mark.parametrize("accept", [0.0, 0.4, 0.7, 1.0])
def test_by_its_own_table_it_is_hardly_slower_than_the_best_constant_depth(accept: float) -> None:
    """Rows end one after another, over and over: many want no drafts where few want deep ones."""
    control = controller("budget")
    start = priced(control.init(), wide=0.45, step=0.02)
    took = {depth: time_of(control, control.depth(start, depth), accept)
            for depth in (None, 0, 1, 2, 3, 4)}
    assert took.pop(None) <= 1.01 * min(took.values())


def time_of(control: Any, state: Any, accept: float) -> float:
    """Plain rounds, expected by the table: 8 rows say 30 tokens, 4 say 30 more, and one 60."""
    phases = {8: 30, 4: 30, 1: 60}  # rounds of each, drafted or not; the tokens are made equal
    seconds, tokens = dict.fromkeys(phases, 0.0), dict.fromkeys(phases, 0.0)
    for turn in range(4):
        for rows, rounds in phases.items():
            before = np.asarray(state.sums)
            one = {"accept": accept, "live": np.arange(8) < rows}
            state, seen = drive(control, state, [one] * rounds)
            if turn:  # it has learned what drafts give
                spent = np.asarray(state.sums) - before
                seconds[rows] += spent[len(SUMS):].sum()
                tokens[rows] += sum((verified[:rows] * accept ** np.arange(DEPTH + 1)).sum()
                                    for *_, verified in seen)
    return sum(rows * rounds * seconds[rows] / tokens[rows] for rows, rounds in phases.items())


def test_what_few_rows_gain_is_no_measure_of_many() -> None:
    """A row alone is five times as fast, eight together twice: they are not to wait for more."""
    control = controller("budget")
    state = priced(control.init(), wide=0.45, step=0.02)
    state, _ = drive(control, state, [{"accept": 1.0, "live": np.arange(8) < 1}] * 40)
    _, seen = drive(control, state, [{"accept": 1.0}] * 3)
    assert [(steps, bucket) for steps, bucket, *_ in seen] == [(3, 2)] * 3
