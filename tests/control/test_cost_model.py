"""Costs: fitted from launches, never falling, corrected online, stored and read again."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import BUCKETS, DEPTH, LIMITS, made_up, record
from helpers import ROOT

from specrl_jax.config import ConfigError
from specrl_jax.control import cost_file, cost_model
from specrl_jax.control.buckets import bucket_table
from specrl_jax.control.cost_model import Point


def truth(point: Point) -> float:
    """A device on which all parts are smooth: launch, layers, attention, drafting, catching up."""
    packed = BUCKETS[point.rows][point.bucket].packed
    verify = 1e-3 * max(1.0, packed / 12) + (1.5e-6 * point.rows + 5e-7 * packed) * point.context
    return 3e-4 + point.rounds * (verify + point.steps * 2e-4) + point.unread * 5e-5


def points(rounds: int = 2, reads: bool = True) -> list[Point]:
    return [p for rows in BUCKETS for p in cost_model.points(LIMITS, rows, rounds, reads)]


@pytest.mark.parametrize("rounds", [1, 2])
def test_fit_finds_the_parts_of_launches(rounds: int) -> None:
    table = cost_model.fit({p: truth(p) for p in points(rounds)}, LIMITS)
    np.testing.assert_allclose(table.launch, 3e-4, rtol=1e-3)
    for size, (rows, buckets) in enumerate(BUCKETS.items()):
        known = [[truth(Point(rows, b, c, 0, 0, 1)) - 3e-4 for c in cost_model.contexts(LIMITS)]
                 for b in range(len(buckets))]
        at = slice(None) if rounds > 1 else slice(1)  # long rounds: wider ones are not at both
        np.testing.assert_allclose(table.verify[size, : len(buckets), at], np.asarray(known)[:, at],
                                   rtol=0.01)
        if len(buckets) > 1:
            np.testing.assert_allclose(table.draft[size, :, 0], 2e-4 * np.arange(DEPTH + 1),
                                       rtol=1e-3)
            assert table.catch_up[size] == pytest.approx(5e-5, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_fit_never_falls_whatever_the_noise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    noisy = {p: truth(p) * float(np.exp(0.5 * rng.standard_normal())) for p in points()}
    table = cost_model.fit(noisy, LIMITS)
    for size, buckets in enumerate(BUCKETS.values()):
        verify = table.verify[size, : len(buckets)]
        assert (verify > 0).all() and all((np.diff(verify, axis=i) >= -1e-9).all() for i in (0, 1))
        assert (np.diff(table.draft[size], axis=0) >= 0).all() and (
            len(buckets) == 1 or (table.draft[size, 1] > 0).all()), "no draft is free"
    assert (table.catch_up >= 0).all() and (table.launch >= 0).all()


def launches(costs: cost_model.CostEstimate, times: np.ndarray, pace: float, seed: int,
             online: bool = True, many: int = 400) -> cost_model.CostEstimate:
    """The estimate after launches of 8 rows on a device whose buckets cost `times` as much."""
    rng = np.random.default_rng(seed)
    for _ in range(many):
        rounds = np.eye(3, dtype=int)[rng.integers(3)] * rng.integers(1, 8) + (rng.random(3) < 0.2)
        believed = cost_model.at(costs, LIMITS, 8, jnp.float32(32)).verify
        spent = np.asarray([*(rounds * believed), 0.0, rounds.sum() * believed[0]], np.float32)
        seconds = pace * float((rounds * times * costs.table.verify[0, :, 0]).sum())
        costs, report = cost_model.learn(costs, LIMITS, record(
            seconds * float(np.exp(0.05 * rng.standard_normal())), row_rounds=8, committed=8),
            spent, online)
        assert all(map(math.isfinite, report.values()))
    return costs


def test_learn_corrects_a_bucket_that_was_measured_wrong() -> None:
    wrong = np.asarray([1.0, 1.3, 1.3])
    costs = launches(cost_model.estimate(made_up(), LIMITS), wrong, 2.0, seed=0)
    actual = np.asarray(cost_model.at(costs, LIMITS, 8, jnp.float32(32)).verify)
    known = np.asarray(made_up().verify[0, :, 0]) * wrong
    np.testing.assert_allclose(actual / actual[0], known / known[0], rtol=0.08)
    assert not np.asarray(costs.correction)[1:].any()
    assert math.exp(costs.pace) * actual[0] == pytest.approx(2.0, rel=0.1)


def test_cost_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    table, file, key = made_up(far=0.3), tmp_path / "deep" / "cost.json", {"device": "x"}
    assert cost_file.load(file, key, table) is None
    cost_file.store(file, key, table)
    actual = cost_file.load(file, key, table)
    assert actual is not None
    jax.tree.map(np.testing.assert_array_equal, actual, table)
    assert cost_file.load(file, {"device": "y"}, table) is None
    assert cost_file.load(file, key, table, since=2e10) is None, "stale"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"key": stored["key"] | {"version": 14}}))
    assert cost_file.load(file, key, table) is None, "an old version is measured anew"


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"key": {"version": 15}, "when": 1}'])
def test_broken_cost_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="control.cost_table = .*measure again") as error:
        cost_file.load(file, {}, made_up())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["qwen2_5_0_5b v5e:2x2", "qwen2_5_7b v6e:4x4"])
def test_a_tpus_default_ratios_are_near_the_compilers_clock(case: str) -> None:
    """16 rows of 8 nodes against plain rounds, contexts apart, within a quarter."""
    result = json.loads((ROOT / "experiments/results/when_it_pays.json").read_text())
    costs = result["cases"][case]["costs"]
    (plain, *_), (drafted, *_) = costs["plain"], costs["8"]
    buckets = {16: bucket_table(16, 8, 128)}
    table = cost_model.default_table(LIMITS._replace(depth=4, buckets=buckets, platform="tpu"))
    actual = (table.verify[0, -1, 0] + table.draft[0, 4, 0]) / table.verify[0, 0, 0]
    assert actual == pytest.approx(drafted["fixed"] / plain["fixed"], rel=0.25)
