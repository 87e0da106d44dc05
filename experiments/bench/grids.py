"""The gain from adapting the setting to the load, here and in ReSpec's Fig. 7.

A grid holds the speed of each setting over plain decoding, per load and repeat. Settings are chosen
on even repeats and judged on odd ones, so that the choice does not profit from noise.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specrl_jax.evaluation.statistics import student

Grid = Mapping[int, Mapping[str, Sequence[float]]]
"""By load and setting. With one repeat, it serves for both choice and judgement."""

OFF = "off"
_SETTINGS = ("3x5x8", "3x5x16", "3x5x32", "3x8x8", "3x8x16", "3x8x32", "5x8x8", "5x8x16", "5x8x32")
# arXiv 2510.26475, Fig. 7: Qwen2.5-7B-Instruct on H100, MT-Bench, temperature 0.6; latency over
# plain decoding's by draft depth x alternatives x verified tokens.
_FIG_7 = {
    1: (1.237, 1.358, 1.270, 1.191, 1.307, 1.323, 1.145, 1.358, 1.411),
    2: (1.200, 1.249, 1.319, 1.273, 1.351, 1.372, 1.240, 1.230, 1.464),
    4: (1.114, 1.230, 1.236, 1.156, 1.335, 1.241, 1.231, 1.229, 1.246),
    8: (1.175, 1.251, 1.144, 1.255, 1.114, 1.113, 1.063, 1.206, 1.135),
    16: (1.301, 1.239, 1.129, 1.383, 1.361, 1.115, 1.204, 1.369, 1.129),
    32: (1.114, 0.957, 0.795, 1.113, 1.003, 0.852, 0.968, 1.009, 0.755),
    64: (0.843, 0.735, 0.536, 0.837, 0.801, 0.555, 0.786, 0.634, 0.448)}
PAPER: Grid = {load: {name: [speed] for name, speed in zip(_SETTINGS, line, strict=True)}
               for load, line in _FIG_7.items()}
MEANS: dict[str, Callable[[Sequence[float]], float]] = {
    "geometric": statistics.geometric_mean, "harmonic": statistics.harmonic_mean}


def grid_of(cases: Mapping[str, Any], drafter: str) -> Grid:
    """Returns a drafter's grid from the cases of `bench.py speculation`, with the arms (policies
    included) that all of its loads have."""
    prefix = f"{drafter} "
    speedups = {int(load): {name.removeprefix(prefix): arm["speedup"]["values"]
                            for name, arm in case["arms"].items()
                            if name.startswith(prefix) and name != f"{prefix}0"}
             for load, case in sorted(cases.items(), key=lambda item: int(item[0]))}
    speedups = {load: of for load, of in speedups.items() if of}
    first, *others = speedups.values()
    common = [name for name in first if all(name in of for of in others)]
    return {load: {name: of[name] for name in common} for load, of in speedups.items()}


def adapting(grid: Grid, policies: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the mean speed over all loads, equally weighted, of each way to choose a setting: the
    best for all loads, the same or off, the best of each load or off, and each policy; and the load
    up to which each gains.

    Args:
      policies: entries of the grid that are no settings.
    """
    settings = [name for name in next(iter(grid.values())) if name not in policies]
    chosen = {load: {name: statistics.geometric_mean(of[name][::2]) for name in settings}
              for load, of in grid.items()}
    best = {load: max(of, key=of.get) for load, of in chosen.items()}
    lines = {name: {load: statistics.median(of[name]) for load, of in grid.items()}
             for name in (*settings, *policies)}
    lines["best of each load"] = {load: statistics.geometric_mean(_odd(grid[load][name]))
                                  for load, name in best.items()}
    return {"break_even": {name: break_even(line) for name, line in lines.items()}} | {
        kind: {way: {"chosen": names} | _judged(grid, names, mean) for way, names in (
            _ways(chosen, best, mean) | {name: dict.fromkeys(grid, name) for name in policies}
        ).items()} for kind, mean in MEANS.items()}


def _ways(chosen: Mapping[int, Mapping[str, float]], best: Mapping[int, str],
          mean: Callable[[Sequence[float]], float]) -> dict[str, dict[int, str]]:
    """Returns the setting of each load, by way of choosing."""
    settings = list(next(iter(chosen.values())))

    def or_off(names: Mapping[int, str]) -> dict[int, str]:
        return {load: name if chosen[load][name] > 1 else OFF for load, name in names.items()}

    static = max(settings, key=lambda name: mean([of[name] for of in chosen.values()]))
    switched = max(settings, key=lambda name: mean([max(of[name], 1) for of in chosen.values()]))
    return {"best static": dict.fromkeys(chosen, static),
            "best static or off": or_off(dict.fromkeys(chosen, switched)),
            "per load": or_off(best)}


def _judged(grid: Grid, names: Mapping[int, str], mean: Callable[[Sequence[float]], float]
            ) -> dict[str, float]:
    """Returns the mean over loads, and its 95 % interval over the repeats that every load has."""
    judged = [_odd(grid[load][name]) for load, name in names.items() if name != OFF]
    off = len(names) - len(judged)
    logs = [math.log(mean([*speeds, *[1.0] * off])) for speeds in zip(*judged, strict=False)]
    verdict = {"speed": math.exp(statistics.mean(logs)) if logs else 1.0}
    if len(logs) > 1:
        low, high = student(logs)
        verdict |= {"low": math.exp(low), "high": math.exp(high)}
    return verdict


def _odd(values: Sequence[float]) -> Sequence[float]:
    """Returns the repeats that a setting is judged on."""
    return values[1::2] or values


def break_even(speed: Mapping[int, float]) -> float | None:
    """Returns the load beyond which speculation loses, interpolated in the logarithm of the load;
    0 where it gains at no load, None where it gains at the largest."""
    loads = sorted(speed)
    gains = [load for load in loads if speed[load] >= 1]
    if not gains:
        return 0.0
    last = loads.index(gains[-1])
    if last == len(loads) - 1:
        return None
    low, high = loads[last], loads[last + 1]
    share = (speed[low] - 1) / (speed[low] - speed[high])
    return low * (high / low) ** share
