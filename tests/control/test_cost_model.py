"""Tables of time: fitted from launches, never falling, stored and read again."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import DEPTH, LADDERS, LONGEST

from specrl_jax.config import ConfigError
from specrl_jax.control import cost_file, cost_model
from specrl_jax.control.cost_file import Record
from specrl_jax.control.cost_model import Point


def truth(point: Point, ladders: cost_model.Ladders = LADDERS) -> float:
    """A device on which all parts are smooth: launch, layers, attention, drafting, catching up."""
    packed = ladders[point.rows][point.bucket].packed
    verify = 1e-3 * max(1.0, packed / 12) + (1.5e-6 * point.rows + 5e-7 * packed) * point.context
    draft = point.steps * (2e-4 + 1e-7 * point.context)
    return 3e-4 + point.rounds * (verify + draft) + point.missed * 5e-5


def measured(noise: float = 0.0, rounds: int = cost_model.ROUNDS) -> dict[Point, float]:
    rng = np.random.default_rng(0)
    fit, held = cost_model.points(LADDERS, LONGEST, DEPTH, True, rounds)
    return {p: truth(p) * float(np.exp(noise * rng.standard_normal())) for p in (*fit, *held)}


def test_a_fit_finds_the_parts_and_its_error_is_that_of_held_out_launches() -> None:
    found = measured()
    fit, held = cost_model.points(LADDERS, LONGEST, DEPTH, True)
    assert not set(fit) & set(held) and {p.rows for p in held} == set(LADDERS)
    tables = cost_model.fit({p: found[p] for p in fit}, LADDERS, LONGEST, DEPTH)
    assert float(tables["8"].launch) == pytest.approx(3e-4, rel=1e-3)
    assert float(tables["8"].catch_up) == pytest.approx(5e-5, rel=0.05)
    for rows, table in tables.items():
        rounds = [[truth(Point(int(rows), b, int(c), 0, 0, 1)) - 3e-4 for c in table.context]
                  for b in range(len(table.packed))]
        np.testing.assert_allclose(table.verify, rounds, rtol=1e-3)
    behind = next(p for p in fit if p.missed)
    assert cost_model.predict(tables, behind) == pytest.approx(found[behind], rel=1e-3)
    assert cost_model.error(tables, found, held) < 0.02
    free = {p: v - p.rounds * p.steps * (2e-4 + 1e-7 * p.context) for p, v in found.items()}
    draft = cost_model.fit({p: free[p] for p in fit}, LADDERS, LONGEST, DEPTH)["8"].draft
    assert (np.diff(draft, axis=0) > 0).all(), "no draft is free"
    one = dict(found) | {held[0]: 2 * found[held[0]]}
    assert cost_model.error(tables, one, held) == pytest.approx(0.5 / len(held), abs=0.02)


def test_wider_buckets_and_deeper_drafts_are_measured_at_the_outermost_contexts() -> None:
    """What they add grows along a line between them, whatever it is in the middle."""
    fit, _ = cost_model.points(LADDERS, LONGEST, DEPTH, True)
    grid = cost_model.contexts(LONGEST)
    asked: dict[tuple[int, int], set[int]] = {(p.bucket, p.steps): set() for p in fit}
    for p in fit:
        asked[p.bucket, p.steps].add(p.context)
    assert asked.pop((0, 0)) == asked.pop((0, 1)) == set(grid)
    assert set(asked) > {(0, DEPTH), (1, 1)}
    assert all(of == {grid[0], grid[-1]} for of in asked.values())


def test_launches_of_one_round_have_the_same_fit_as_those_of_two() -> None:
    once = measured(rounds=1)
    assert [sum(p.rounds == r for p in once) for r in (0, 1)] == [
        sum(p.rounds == r for p in measured()) for r in (1, cost_model.ROUNDS)]
    assert cost_model.rounds_of(once) == 1 and cost_model.rounds_of(measured()) == cost_model.ROUNDS
    one, two = (cost_model.fit(of, LADDERS, LONGEST, DEPTH) for of in (once, measured()))
    for name in (f.name for f in dataclasses.fields(cost_model.Table)):
        for rows in two:
            np.testing.assert_allclose(getattr(one[rows], name), getattr(two[rows], name),
                                       rtol=1e-4, err_msg=name)


def test_batch_sizes_between_two_others_are_left_out() -> None:
    def out(*sizes: int, nodes: int = 9, most: int = 128) -> set[int]:
        return cost_model.left_out(
            {rows: cost_model.bucket_ladder(rows, nodes, most) for rows in sizes}
        )

    assert out(64, 48, 32, 24, 16, 8) == out(16, 64, 8, 24, 32, 48) == {48, 24}
    assert out(64, 48, 31) == out(8, 4) == out(8) == set()
    assert out(64, 48, 32, 24, 16, most=64) == {32}, "64 rows do not draft here"
    assert out(64, 48, 32, 24, 16, nodes=5) == {48}, "16 pack 80 at most, and 24 as many as 120"


@pytest.mark.parametrize("most, nodes", [(128, 9), (72, 9), (64, 9), (96, 6)])
def test_where_rounds_are_long_a_batch_size_between_others_is_a_line(most: int, nodes: int) -> None:
    """Time is linear here in rows and packed tokens, so the line is what it would take."""
    ladders = {rows: cost_model.bucket_ladder(rows, nodes, most, empties=rows == 16)
               for rows in (64, 48, 32, 24, 16)}

    def takes(point: Point) -> float:
        own = 1e-5 + point.rounds * (2e-6 * point.steps) + 1e-6 * point.missed
        return truth(point, ladders) + point.rows * own + 1e-3 * (
            point.bucket > 0 and ladders[point.rows][point.bucket].packed == point.rows)

    out = cost_model.left_out(ladders)
    fit, held = cost_model.points(ladders, LONGEST, DEPTH, True, 1)
    assert out and {p.rows for p in fit} == set(ladders) - out
    assert {p.rows for p in held} == set(ladders)
    found = {p: takes(p) for p in (*fit, *held)}
    tables = cost_model.fit({p: found[p] for p in fit}, ladders, LONGEST, DEPTH)
    assert list(tables) == list(map(str, ladders))
    assert cost_model.error(tables, found, [p for p in held if p.rows in out]) < 0.02
    for rows in out:
        table, launch = tables[str(rows)], 3e-4 + 1e-5 * rows
        rounds = [[takes(Point(rows, b, int(c), 0, 0, 1)) - launch for c in table.context]
                  for b in range(len(ladders[rows]))]
        np.testing.assert_allclose(table.verify, rounds, rtol=1e-3)
        np.testing.assert_allclose(
            table.draft[2], 2 * (2e-4 + 2e-6 * rows + 1e-7 * table.context), rtol=1e-3)
        assert float(table.catch_up) == pytest.approx(5e-5 + 1e-6 * rows, rel=0.05)
        assert float(table.launch) == pytest.approx(launch, rel=1e-3)
    short, _ = cost_model.points(ladders, LONGEST, DEPTH, True)
    assert {p.rows for p in short} == set(ladders), "short rounds are measured of all"


@pytest.mark.parametrize("buckets, longest", [(1, LONGEST), (1, 8), (2, 8)])
def test_one_context_and_one_bucket_are_fitted_too(buckets: int, longest: int) -> None:
    ladders = {rows: of[:buckets] for rows, of in LADDERS.items()}
    for rounds in (1, cost_model.ROUNDS):
        fit, held = cost_model.points(ladders, longest, DEPTH, True, rounds)
        found = {p: truth(p) for p in (*fit, *held)}
        tables = cost_model.fit(found, ladders, longest, DEPTH)
        assert cost_model.error(tables, found, fit) < 1e-3


def test_what_a_drafter_missed_is_charged_by_a_long_stretch_and_only_to_one_that_reads() -> None:
    """Noise of two launches must not become that of a prompt many times as long."""
    middle = cost_model.contexts(LONGEST)[1]
    found, _ = cost_model.points(LADDERS, LONGEST, DEPTH, True)
    assert {p.missed for p in found} == {0, middle}
    slower = {p: truth(p._replace(missed=0)) + 1e-3 * (p.missed > 0) for p in measured()}
    table = cost_model.fit(slower, LADDERS, LONGEST, DEPTH)["8"]
    assert 0 < float(table.catch_up) * LONGEST <= 1.001e-3 * LONGEST / middle
    fit, held = cost_model.points(LADDERS, LONGEST, DEPTH, False)
    assert not any(p.missed for p in (*fit, *held)) and set(fit) < set(found)
    tables = cost_model.fit({p: truth(p) for p in fit}, LADDERS, LONGEST, DEPTH)
    assert all(float(table.catch_up) == 0 for table in tables.values())


def test_a_draft_step_is_no_matter_of_what_launches_of_one_round_take() -> None:
    """Their noise is that of a launch; a step is a small part of one."""
    found = measured()
    spoilt = {p: v * (1.3 if p.rounds == 1 else 1) for p, v in found.items()}
    calm, other = (cost_model.fit(of, LADDERS, LONGEST, DEPTH)["8"] for of in (found, spoilt))
    assert float(other.launch) > 2 * float(calm.launch)
    np.testing.assert_allclose(other.draft, calm.draft, rtol=1e-5)


def test_a_slow_phase_and_a_spoilt_run_leave_the_ratios_to_the_reference() -> None:
    """The reference is run around every launch; the machine's pace changes steadily between."""
    reference, near, far = (cost_model.Point(4, 0, context, 0, 0, 3) for context in (32, 64, 128))
    takes = {reference: 0.1, near: 0.2, far: 0.3}
    order = [reference, near, far, reference] * 3
    slow = np.exp(np.interp(range(len(order)), [0, 3, 4, 7, 8, 11], [0, 0.9, 1.2, 0, 0.3, 0.6]))
    runs = [cost_model.Run(point, when, takes[point] * pace)
            for when, (point, pace) in enumerate(zip(order, slow, strict=True))]
    runs[5] = runs[5]._replace(seconds=7.0)
    found = cost_model.steady(runs, reference)
    assert found[near] / found[reference] == pytest.approx(2)
    assert found[far] / found[reference] == pytest.approx(3)
    assert found[reference] == pytest.approx(0.1 * np.exp(0.45))  # the median of its six runs


@pytest.mark.parametrize(
    "ladders, rounds",
    [
        (LADDERS, cost_model.ROUNDS),
        ({n: cost_model.bucket_ladder(n, 9, 128) for n in (64, 48, 32, 24, 16)}, 1),
    ],
)
@pytest.mark.parametrize("noise, seeds", [(0.0, 1), (0.5, 30)])
def test_time_never_falls_in_packed_tokens_context_or_steps(
        noise: float, seeds: int, ladders: cost_model.Ladders, rounds: int) -> None:
    fit, _ = cost_model.points(ladders, LONGEST, DEPTH, True, rounds)
    found = [table for seed in range(seeds) for table in cost_model.fit(
        {p: truth(p, ladders) * float(np.exp(noise * normal)) for p, normal in zip(
            fit, np.random.default_rng(seed).standard_normal(len(fit)), strict=True)},
        ladders, LONGEST, DEPTH).values()]
    for table in found:
        assert all((np.diff(of, axis=axis) >= 0).all() for of in (table.verify, table.draft)
                   for axis in (0, 1))
    for table in found[:len(ladders)]:
        contexts = np.arange(1, LONGEST + 50, 7)
        verify, draft = (np.stack(a) for a in zip(
            *(cost_model.at(table, jnp.float32(c)) for c in contexts), strict=True))
        assert (verify > 0).all() and (draft >= 0).all() and (draft[:, 0] == 0).all()
        for values in (verify, draft):
            rounding = -3 * np.spacing(values.max())  # of a line along which nothing grows
            assert (np.diff(values, axis=0) >= rounding).all(), "falls with context"
            assert (np.diff(values, axis=1) >= rounding).all(), "falls with packed tokens or steps"


def test_drafts_that_are_all_but_free_do_not_fall_with_context() -> None:
    """The least that a step takes is a share of a plain round, measured slower at a short context.
    """
    found = {p: 1e-3 * p.rounds * (1.3 if p.context == cost_model.SHORTEST else 1.0)
             for p in measured()}
    table = cost_model.fit(found, LADDERS, LONGEST, DEPTH)["8"]
    assert (np.diff(table.draft, axis=1) >= 0).all() and (np.diff(table.draft, axis=0) > 0).all()


def test_at_a_measured_context_the_table_is_what_was_measured() -> None:
    table = cost_model.fit(measured(), LADDERS, LONGEST, DEPTH)["8"]
    for i, context in enumerate(table.context):
        np.testing.assert_allclose(
            cost_model.at(table, jnp.float32(context))[0], table.verify[:, i], rtol=1e-6
        )
    middle = (table.context[0] + table.context[1]) / 2
    np.testing.assert_allclose(cost_model.at(table, jnp.float32(middle))[0],
                               table.verify[:, :2].mean(1), rtol=1e-5)


def test_isotonic_is_the_nearest_in_the_largest_change() -> None:
    np.testing.assert_allclose(
        cost_model.isotonic([[1.0, 3.0], [2.0, 2.0]]), [[1.0, 2.5], [2.0, 2.5]]
    )
    rising = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(cost_model.isotonic(rising), rising)


def test_buckets_hold_what_is_asked_for() -> None:
    table = cost_model.blank(LADDERS, LONGEST, DEPTH)["8"]
    packed, nodes = jnp.asarray([1.0, 8.0, 8.0, 9.0, 32.0, 99.0]), jnp.asarray([1.0, 1, 4, 2, 5, 5])
    assert cost_model.bucket_for(table, packed, nodes).tolist() == [0, 0, 1, 1, 2, 2], (
        "no node in roots"
    )
    empties = table.replace(packed=jnp.asarray([8.0, 8, 16]), nodes=jnp.asarray([1.0, 5, 5]))
    assert cost_model.bucket_for(empties, packed, nodes).tolist() == [0, 0, 1, 2, 2, 2]


KEY = {"device": "made up", "shapes": {"batch": 8}}


def test_launches_are_stored_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cost.json"
    assert cost_file.load(path, KEY) is None
    record = Record(measured(0.1), 0.07, 1.5, 1e9)
    cost_file.store(path, KEY, record)
    again = cost_file.load(path, KEY)
    assert again == record
    assert json.loads(path.read_text())["error"] == 0.07 and not list(path.parent.glob("*.tmp"))
    for before, after in zip(
        *(
            dataclasses.astuple(cost_model.fit(r.measured, LADDERS, LONGEST, DEPTH)["8"])
            for r in (record, again)
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(before, after)


def test_what_was_measured_for_another_key_or_version_is_not_used(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cost.json"
    cost_file.store(path, KEY, Record(measured(), 0.0, 1.0, 1e9))
    assert cost_file.load(path, KEY | {"device": "other"}) is None
    assert cost_file.default_path(KEY) != cost_file.default_path(KEY | {"device": "other"})
    assert cost_file.load(path, KEY, since=1e9) is not None
    assert cost_file.load(path, KEY, since=1e9 + 1) is None, "stale"
    monkeypatch.setattr(cost_file, "VERSION", cost_file.VERSION + 1)
    assert cost_file.load(path, KEY) is None


@pytest.mark.parametrize("text", ["", "{}", '{"key": 1, "points": 2}', "[1]"])
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    if text.startswith('{"key"'):
        path.write_text(json.dumps({"key": json.loads(cost_file._plain(KEY)), "points": 2}))
    with pytest.raises(ConfigError, match="control.cost_table") as error:
        cost_file.load(path, KEY)
    assert "\n" not in str(error.value) and "remove it" in str(error.value)
