"""Policies against fixed settings: one cell is rows, a context, a drafter and lengths."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specrl_jax.config import Config, as_dict
from specrl_jax.control.protocol import make_spec
from specrl_jax.io.launches import LAUNCHES, MEASURED, summary
from specrl_jax.rollout.engine import Engine

from . import hindsight
from .controller_cells import Cell
from .controller_shape import Run, Shape, said
from .controller_stats import best_fixed, describe, half_width, near
from .hindsight import Pace
from .timing import alternate

POLICIES = ("budget", "respec", "bandit", "oracle")
LEAST = 12  # pairs of a duel: few may lie close together by chance
AGAIN = 3  # times `repeats`: the runs by which settings that are near the fastest are told apart
WARM_UPS = 4  # rollouts of every policy before it is timed
PAIRS = 4  # of one more occasion, at least: budget's eighth rollout tries what may be cheaper

Arm = Callable[[int], Run]  # a rollout of a load


def run_cell(shape: Shape, cell: Cell, repeats: int, precise: float, seconds: float,
             say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Chooses the best fixed setting, times all arms by turns, then budget against that one.

    `oracle` goes by what the settings gave and took in the runs that choose.

    Args:
      repeats: runs of each fixed setting to choose by, AGAIN times as many of the fastest ones,
        of each arm to time it by, and at a time of the last duel, which ends when the ratio is
        known; at least 2.
      precise: half-width of budget's 95 % interval at which it ends.
      seconds: of timed runs after those that choose, after which it ends in any case.
    """
    shape.begin(cell)
    arms = _arms(shape)
    settings = [_name(setting) for setting in shape.settings]
    chosen_by = _choose({name: arms[name] for name in ("off", *settings)}, shape.choosing, repeats)
    choosing = times(chosen_by)
    paced = {name: hindsight.paces(run.result for run in of) for name, of in chosen_by.items()}
    if "oracle" in shape.policies:
        _teach(shape.policies["oracle"].engine, settings,
               {name: _accept_length(of) for name, of in chosen_by.items()}, paced)
    for policy, turn in itertools.product(shape.policies, range(WARM_UPS)):
        arms[policy](shape.choosing(turn))
    began, turns = time.perf_counter(), map(shape.timed, itertools.count())
    runs = _by_turns(arms, turns, repeats, say)
    duel: dict[str, list[Run]] = {name: [] for name in (best_fixed(choosing), "budget")}
    while time.perf_counter() - began < seconds and (
            len(duel["budget"]) < LEAST
            or half_width(choosing, times(runs), times(duel)) > precise):
        for name, new in _by_turns({name: arms[name] for name in duel}, turns, repeats).items():
            duel[name] += new
    equal = {name: all(map(_equal, of, runs["off"])) for name, of in runs.items()}
    equal["budget"] &= same(duel)
    priced = {name: s for name, s in shape.policies.items() if s.cost_record}
    return describe(choosing, times(runs), times(duel),
                    _ceiling(shape, chosen_by, paced, repeats)) | {
        "cell": cell._asdict(), "loads": len(shape.loads), "tokens": int(np.mean([
            run.result.sequences.length.sum() for run in runs["off"]])),
        "compilations": sum(run.compilations for of in (*runs.values(), *duel.values())
                            for run in of),
        "equal_tokens": equal,
        "accept_length": {name: _short(_accept_length(of)) for name, of in runs.items()},
        "explained": {
            name: _explained(of[-1], name == "budget" and cell.lengths != "uniform")
            for name, of in runs.items() if name in shape.policies},
        "cost_error": {name: _short(s.cost_record.error) for name, s in priced.items()},
        "cost_seconds": {name: _short(s.cost_record.seconds) for name, s in priced.items()},
        "config": _changed(shape.policies["budget"].config, shape.config)}


def fight(shape: Shape, cell: Cell, best: str, occasion: int, seconds: float = 0.0
          ) -> dict[str, list[Run]]:
    """Runs of budget and the fixed setting `best` by turns, after both were warmed up: PAIRS of
    each, and PAIRS more as long as these have not taken `seconds`."""
    shape.begin(cell)
    arms = {name: arm for name, arm in _arms(shape).items() if name in (best, "budget")}
    arms[best](shape.choosing(0))
    for turn in range(WARM_UPS):
        arms["budget"](shape.choosing(turn))
    began, turns = time.perf_counter(), map(shape.timed, itertools.count(PAIRS * occasion))
    runs = _by_turns(arms, turns, PAIRS)
    while time.perf_counter() - began < seconds:
        for name, new in _by_turns(arms, turns, PAIRS).items():
            runs[name] += new
    return runs


def same(runs: Mapping[str, Sequence[Run]]) -> bool:
    """Whether all arms said the same in each repeat."""
    first, *others = runs.values()
    return all(all(map(_equal, first, of)) for of in others)


def _by_turns(arms: Mapping[str, Arm], loads: Iterator[int], repeats: int,
              say: Callable[[str], None] = lambda text: None) -> dict[str, list[Run]]:
    """The runs of all arms, each repeat with the next load."""
    some = list(itertools.islice(loads, repeats))
    tasks = {name: functools.partial(next, map(arm, some)) for name, arm in arms.items()}
    return alternate(tasks, repeats, say)


def _choose(arms: Mapping[str, Arm], load: Callable[[int], int], repeats: int
            ) -> dict[str, list[Run]]:
    """Runs of every fixed arm, and more of those among which the fastest still is."""
    loads = map(load, itertools.count())
    runs = _by_turns(arms, loads, repeats)
    for _ in range(AGAIN - 1):
        for name, new in _by_turns({name: arms[name] for name in near(times(runs))}, loads,
                                   repeats).items():
            runs[name] += new
    return runs


def _teach(oracle: Engine, settings: Sequence[str], accepted: Mapping[str, float],
           paced: Mapping[str, Mapping[int, Pace]]) -> None:
    """What the settings really gave and took, in the engine's order of settings and batch sizes."""
    oracle.control = oracle.control.replace(own=oracle.control.own.replace(
        tokens=np.asarray([accepted[name] for name in settings], np.float32),
        gain=hindsight.gains(paced, settings, sorted(oracle.shapes.batches))))


def _ceiling(shape: Shape, runs: dict[str, list[Run]], paced: dict[str, dict[int, Pace]],
             repeats: int) -> float | None:
    """Speed over plain decoding with foresight, of chains; None where no setting is a chain."""
    chains = {setting[0]: _name(setting) for setting in shape.settings if setting[1] == 1}
    if not chains:
        return None
    shards, most = shape.fixed.engine.shapes.shards, shape.fixed.engine.decoder.most
    costs: dict[int, dict[int, float]] = {}
    for depth, name in ({0: "off"} | chains).items():
        for size, (_, seconds) in paced[name].items():
            costs.setdefault(size * shards, {})[depth] = seconds
    plain = best = 0.0
    for i in range(repeats):
        good = hindsight.acceptable(
            {depth: runs[name][i].result for depth, name in chains.items()}, most * shards)
        length = np.asarray(runs["off"][i].result.sequences.length)
        plain += hindsight.seconds_with_foresight(good, length, most * shards, {
            size: {0: depths[0]} for size, depths in costs.items() if 0 in depths})
        best += hindsight.seconds_with_foresight(good, length, most * shards, costs)
    return plain / best


def _arms(shape: Shape) -> dict[str, Arm]:
    def fixed(setting: tuple[int, int, int], load: int) -> Run:
        engine = shape.fixed.engine
        engine.control = make_spec(*setting, 0, (1.0,) * len(engine.decoder.drafter.names))
        return shape.run(shape.fixed, load)

    arms: dict[str, Arm] = {"off": functools.partial(shape.run, shape.plain)}
    arms |= {_name(setting): functools.partial(fixed, setting) for setting in shape.settings}
    return arms | {name: functools.partial(shape.run, sampler)
                   for name, sampler in shape.policies.items()}


def _explained(run: Run, launches: bool) -> dict[str, Any]:
    """Metrics of a rollout; launch by launch only for those that a picture may show."""
    told, one_by_one = summary(run.result.trace), (LAUNCHES, MEASURED)
    return {name: value if name in one_by_one else _short(value) for name, value in told.items()
            if launches or name not in one_by_one}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _changed(config: Config, base: Config) -> dict[str, dict[str, Any]]:
    """What an engine was built with, where that is not what the file's config says."""
    old = as_dict(base)
    return {name: {field: value for field, value in as_dict(config)[name].items()
                   if value != old[name][field]} for name in ("rollout", "spec", "control")}


def _name(setting: tuple[int, int, int]) -> str:
    return "x".join(map(str, setting))


def times(runs: dict[str, list[Run]]) -> dict[str, list[float]]:
    return {name: [run.seconds for run in of] for name, of in runs.items()}


def _equal(one: Run, other: Run) -> bool:
    return bool((said(one.result, 1) == said(other.result, 1)).all())


def _accept_length(runs: Sequence[Run]) -> float:
    return float(np.mean([run.accept_length for run in runs]))
