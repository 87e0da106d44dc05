"""What timed arms say: the best fixed setting without its luck, ratios, and a picture."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy.special import stdtrit

from specrl_jax.evaluation.statistics import LEVEL

from .controller_cells import STOP

POLICIES = ("budget", "respec", "bandit", "oracle")
COLORS = {"budget": "#4269d0", "respec": "#efb118", "bandit": "#ff725c", "oracle": "#3ca951"}
NEAR = 1.1  # times the fastest
MOST = 12  # times the occasions asked for, where the ratio changes with the machine's pace
USEFUL = 1.05  # times the speed of off, with foresight: what is asked of a policy
SHOWN = (0.6, 1.4)  # speeds in the picture: intervals of few pairs reach beyond
Times = Mapping[str, Sequence[float]]


def best_fixed(choosing: Times) -> str:
    """The fixed arm, off included, that was fastest in runs that do not time it."""
    some = _run_most(choosing)
    return min(some, key=lambda name: statistics.median(some[name]))


def near(choosing: Times) -> list[str]:
    """The fixed arms among which the fastest may be."""
    fastest = statistics.median(choosing[best_fixed(choosing)])
    return [name for name, of in _run_most(choosing).items()
            if statistics.median(of) <= NEAR * fastest]


def _run_most(choosing: Times) -> Times:
    """Those that were near all along; the others had fewer loads, which may be easier."""
    most = max(map(len, choosing.values()))
    return {name: of for name, of in choosing.items() if len(of) == most}


def _median_of_same(choosing: Times, name: str) -> float:
    """Of an arm, over the loads that all arms had."""
    return statistics.median(choosing[name][:min(map(len, choosing.values()))])


def pairs(times: Times, name: str, other: str, duel: Times) -> tuple[list[float], list[float]]:
    """Seconds of both, and in a duel where `name` fought one."""
    mine, theirs = times[name], times[other]
    return ([*mine, *duel[name]], [*theirs, *duel[other]]) if name in duel else (
        list(mine), list(theirs))


def _logs(mine: Sequence[float], other: Sequence[float]) -> list[float]:
    return [math.log(b / a) for a, b in zip(mine, other, strict=True)]


def _mean_log(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    logs = _logs(mine, other)
    spread = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return statistics.mean(logs), spread


def interval(mean: float, error: float, freedom: float) -> dict[str, float]:
    """A ratio with Student's 95 % interval, from a mean logarithm and its standard error."""
    t = stdtrit(freedom, (1 + LEVEL) / 2) if freedom else 0.0
    return {"ratio": math.exp(mean), "low": math.exp(mean - t * error),
            "high": math.exp(mean + t * error)}


def half_width(choosing: Times, times: Times, duel: Times) -> float:
    """Of the 95 % interval of budget's speed over the best fixed setting's."""
    arm = describe(choosing, times, duel)["arms"]["budget"]
    return (arm["high"] - arm["low"]) / 2


def describe(choosing: Times, times: Times, duel: Times, ceiling: float | None = None
             ) -> dict[str, Any]:
    """The best fixed setting, and the speed of every arm over it with its interval.

    Args:
      choosing: seconds of the fixed arms, by which the best is chosen.
      times: of all arms, run by turns, at least two runs of each.
      duel: of budget and the best fixed setting alone, run by turns.
      ceiling: speed over off in the runs that choose, of one who foresees what is accepted.
    """
    best, arms = best_fixed(choosing), {}
    for name in times:
        mine, theirs = pairs(times, name, best, duel if name != best else {})
        mean, error = _mean_log(mine, theirs)
        arm = interval(mean, error, len(mine) - 1) | {
            "log_mean": mean, "log_error": error, "median_seconds": statistics.median(times[name])}
        arms[name] = {key: float(f"{x:.8g}") for key, x in arm.items()} | {"pairs": len(mine)}
    return {"best_fixed": best, "arms": arms, "choosing": _rounded(choosing),
            "seconds": _rounded(times), "duel": _rounded(duel)} | ({} if ceiling is None else {
                "ceiling": ceiling * _median_of_same(choosing, best)
                / _median_of_same(choosing, "off")})


def fought(case: Mapping[str, Any], later: Times) -> dict[str, Any]:
    """A cell with the seconds that budget and its best fixed setting took on one more occasion.

    Runs that follow each other share what others do on the machine then: cells that were timed
    twice differed by 2.4 times what pairs of one occasion tell. So each occasion is one value of
    the interval, the median of its pairs: others' bursts take 30 to 80 % longer for one run.
    """
    best, after = case["best_fixed"], [*case.get("later", ()), _rounded(later)]
    each = [pairs(case["seconds"], "budget", best, case["duel"]),
            *((of["budget"], of[best]) for of in after)]
    logs = [statistics.median(_logs(*of)) for of in each]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    arm = interval(mean, error, len(logs) - 1) | {"log_mean": mean, "log_error": error}
    arm = {key: float(f"{x:.8g}") for key, x in arm.items()} | {
        "pairs": sum(len(of) for of, _ in each), "occasions": len(logs)}
    return {**case, "later": after, "arms": {
        **case["arms"], "budget": case["arms"]["budget"] | arm}}


def uncertain(case: Mapping[str, Any], occasions: int, precise: float) -> bool:
    """Whether budget is to fight on one more occasion: it has on fewer, or the interval is wide."""
    arm, done = case["arms"]["budget"], 1 + len(case.get("later", ()))
    wide = (arm["high"] - arm["low"]) / 2 > precise
    return done < occasions or (1 < occasions and wide and done < MOST * occasions)


def _rounded(times: Times) -> dict[str, list[float]]:
    return {name: [float(f"{s:.5g}") for s in of] for name, of in times.items()}


def summarize(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Geometric means over all cells but rollouts until stop tokens, worst cells, seconds over
    oracle's, regret, and one fixed setting for heavy ones, and for those with a useful drafter.

    Regret is the share of the seconds of the better of oracle and the best fixed setting, cell by
    cell, that a policy takes more.
    """
    found: dict[str, Any] = {}
    cells = {name: cell for name, cell in cells.items() if cell["cell"]["lengths"] != STOP}
    for name in POLICIES:
        of = {key: cell["arms"][name] for key, cell in cells.items() if name in cell["arms"]}
        if not of:
            continue
        found[name] = _geometric_mean(list(of.values())) | {
            "cells": len(of), "worst": min(of, key=lambda key: of[key]["ratio"]),
            "lowest_upper_bound": min(a["high"] for a in of.values()),
            "widest_half_interval": max((a["high"] - a["low"]) / 2 for a in of.values())}
        if name != "oracle" and all("oracle" in cell["arms"] for cell in cells.values()):
            found[name]["seconds_over_oracle"] = _over(list(cells.values()), "oracle", name)
            found[name]["regret"] = _regret(list(cells.values()), name)
    if cells and all("ceiling" in cell for cell in cells.values()):
        found["ceiling"] = statistics.geometric_mean(c["ceiling"] for c in cells.values())
    heavy = [cell for cell in cells.values() if cell["cell"]["lengths"] == "heavy"]
    return found | {"heavy": one_setting(heavy),
                    "heavy_useful": one_setting([cell for cell in heavy if _useful(cell)])}


def _geometric_mean(arms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of ratios whose variances and numbers of values differ (Welch 1947, Satterthwaite 1946)."""
    variances = [arm["log_error"] ** 2 for arm in arms]
    weights = sum(v**2 / (arm.get("occasions", arm["pairs"]) - 1)
                  for v, arm in zip(variances, arms, strict=True))
    return interval(statistics.mean(arm["log_mean"] for arm in arms),
                    math.sqrt(sum(variances)) / len(arms),
                    sum(variances) ** 2 / weights if weights else 0)


def _regret(cells: Sequence[Any], name: str) -> float:
    """See `summarize`; medians of runs."""
    def median(cell: Any, arm: str) -> float:
        return statistics.median(cell["seconds"][arm])

    best = sum(min(median(cell, "oracle"), median(cell, cell["best_fixed"])) for cell in cells)
    return sum(median(cell, name) for cell in cells) / best - 1


def _over(cells: Sequence[Any], name: str, other: str) -> dict[str, float]:
    """Speed of an arm over another on all cells together: seconds of the first run in each cell, of
    the second, and so on, as far as all go."""
    mine, theirs = ([sum(runs) for runs in zip(*(cell["seconds"][n] for cell in cells),
                                               strict=False)] for n in (name, other))
    return interval(*_mean_log(mine, theirs), len(mine) - 1)


def one_setting(some: Sequence[Any]) -> dict[str, Any]:
    """Total seconds over cells, against the one setting for all that is best on their total.

    It is chosen on the runs that choose, as everywhere.
    """
    if not some:
        return {}
    fixed = [name for name in some[0]["choosing"] if all(name in c["choosing"] for c in some)]
    best = min(fixed, key=lambda name: sum(_median_of_same(c["choosing"], name) for c in some))
    return {"setting": best, "cells": len(some), **{
        name: _over(some, name, best)
        for name in POLICIES if all(name in c["arms"] for c in some)}}


def _useful(cell: Any) -> bool:
    """Whether replayed streams are not all spoilt; of another drafter, whether one who foresees
    what is accepted is USEFUL times as fast as off in the runs that choose; so is one of which
    that is not known, as no setting is a chain."""
    if cell["cell"]["corruption"] is not None:
        return cell["cell"]["corruption"] < 1
    if "ceiling" not in cell:
        return True
    off, best = (_median_of_same(cell["choosing"], name) for name in ("off", cell["best_fixed"]))
    return cell["ceiling"] * off / best >= USEFUL


def draw(cells: Mapping[str, Any], path: Path) -> None:
    """Each policy's speed over the best fixed setting, cell by cell, and one rollout's trace."""
    figure = Figure(figsize=(11, 2.5 + 0.24 * len(cells)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    left.axvline(1, color="#222222", linewidth=0.8)
    for row, cell in enumerate(cells.values()):
        for place, (name, color) in enumerate(COLORS.items()):
            if name in cell["arms"]:
                arm, y = cell["arms"][name], row + 0.2 * place - 0.3
                left.plot([arm["low"], arm["high"]], [y, y], color=color, linewidth=1)
                left.plot(arm["ratio"], y, "o", color=color, markersize=4,
                          label=name if row == 0 else None)
    left.set_yticks(range(len(cells)), [f"{name} ({cell['best_fixed']})"
                                        for name, cell in cells.items()], fontsize=7)
    left.set_ylim(len(cells) - 0.5, -0.5)
    left.set_xlim(*SHOWN)
    left.set_xlabel("speed over the best fixed setting of the cell (its name in brackets)")
    left.legend(frameon=False, fontsize=8)
    draw_trace(right, cells)
    figure.savefig(path, dpi=100)


def draw_trace(axes: Any, cells: Mapping[str, Any]) -> None:
    """Active rows, chosen nodes of all rows and tokens per second of budget, launch by launch, in
    the rollout whose rows end at stop tokens; else in the largest heavy-tailed one."""
    heavy = [c for c in cells.values() if c["cell"]["lengths"] != "uniform"
             and c.get("explained", {}).get("budget")]
    if not heavy:
        axes.set_visible(False)
        return
    cell = max(heavy, key=lambda c: (c["cell"]["lengths"] == STOP, c["cell"]["rows"],
                                     -(c["cell"]["corruption"] or 0)))
    told = cell["explained"]["budget"]
    seconds = [launch["seconds"] for launch in told["time/launches"]]
    edges = [0.0, *itertools.accumulate(seconds)]
    launches = told["control/launches"]
    for label, values in (
            ("active rows", [one["live"] for one in launches]),
            ("chosen nodes", [one["live"] * one["nodes"] for one in launches]),
            ("tokens/s", [one["tokens"] / s for one, s in zip(launches, seconds, strict=True)])):
        axes.stairs(values, edges, baseline=None, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("seconds")
    axes.set_title(f"budget, {cell['cell']['rows']} rows, context {cell['cell']['context']}",
                   fontsize=9)
    axes.legend(frameon=False, fontsize=8)
