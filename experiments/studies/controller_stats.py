"""What timed arms tell: the best fixed setting without its luck, and ratios with intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from specrl_jax.evaluation.statistics import LEVEL

NEAR = 1.1  # times the fastest
Times = Mapping[str, Sequence[float]]


def best_fixed(choosing: Times) -> str:
    """Returns the fixed arm, off included, that was fastest in runs that do not time it."""
    some = _run_most(choosing)
    return min(some, key=lambda name: statistics.median(some[name]))


def near(choosing: Times) -> list[str]:
    """Returns the fixed arms among which the fastest may be."""
    fastest = statistics.median(choosing[best_fixed(choosing)])
    return [name for name, of in _run_most(choosing).items()
            if statistics.median(of) <= NEAR * fastest]


def _run_most(choosing: Times) -> Times:
    """The arms that were near all along; the others had fewer loads, which may be easier."""
    most = max(map(len, choosing.values()))
    return {name: of for name, of in choosing.items() if len(of) == most}


def arms(case: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the speed of every arm over the best fixed setting, with a 95 % interval.

    Pairs of budget and that setting count both by turns with all arms and alone.
    """
    best, seconds = case["best_fixed"], case["seconds"]
    by_arm = {}
    for name, mine in seconds.items():
        pairs = _logs(mine, seconds[best])
        for alone in case["duels"] if name == "budget" else ():
            pairs += _logs(alone[name], alone[best])
        by_arm[name] = interval(pairs) | {"median_seconds": statistics.median(mine),
                                          "pairs": len(pairs)}
    return by_arm


def _logs(mine: Sequence[float], other: Sequence[float]) -> list[float]:
    return [math.log(b / a) for a, b in zip(mine, other, strict=True)]


def interval(logs: Sequence[float]) -> dict[str, float]:
    """Returns a ratio with Student's interval, from its logarithms."""
    mean, n = statistics.mean(logs), len(logs)
    error = statistics.stdev(logs) / math.sqrt(n) * stdtrit(n - 1, (1 + LEVEL) / 2) if n > 1 else 0
    return {"ratio": math.exp(mean), "low": math.exp(mean - error), "high": math.exp(mean + error)}


def summarize(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Returns each policy's geometric mean over the best fixed settings, and its worst cell."""
    summary = {}
    for name in dict.fromkeys(name for case in cases.values() for name in case["explained"]):
        ratios = {key: case["arms"][name]["ratio"] for key, case in cases.items()
                  if name in case["arms"]}
        summary[name] = interval([math.log(r) for r in ratios.values()]) | {
            "cells": len(ratios), "worst": min(ratios, key=lambda key: ratios[key])}
    return summary
