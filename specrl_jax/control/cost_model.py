"""What a round costs on this device for this model: a measured table, corrected online.

A launch takes launch + rounds * (verify + draft) + unread * catch_up seconds. `verify` is a whole
round without a draft in one bucket, `draft` what drafting to a depth adds, and `catch_up` the
drafter's reading of one position that it has not seen.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.control.protocol import Limits
from specrl_jax.structs import Array, LaunchRecord, carrier

SHORTEST = 32  # tokens of context where costs are measured, and Limits.longest
LEAST_STEP = 0.002  # of a plain round: the least that a draft step takes, whatever was measured
FOLLOW = 0.2  # share of a launch's surprise that the pace of the machine absorbs
LEARN = 0.03  # and share that the costs it consists of absorb
MOST = 0.5  # logarithm of a surprise, and of a correction


class Ratios(NamedTuple):
    """Costs of rounds relative to each other, which a controller starts from."""

    tokens: float  # whose arithmetic takes as long as reading all weights
    draft: float  # a level of a draft, in plain rounds


# On a TPU by the compiler's clock, of 0.5B on v5e and 7B on v6e (docs/guides/when_it_pays.md).
RATIOS = {"cpu": Ratios(16, 0.05), "gpu": Ratios(16, 0.05), "tpu": Ratios(200, 0.1)}


class CostTable(struct.PyTreeNode):
    """Seconds, for the batch sizes of `Limits.buckets` in order; unused buckets repeat the last."""

    verify: Array  # f32[sizes, buckets, 2] at the shortest and the longest context
    draft: Array  # f32[sizes, D+1, 2]
    catch_up: Array  # f32[sizes] a position that the drafter has not read
    launch: Array  # f32[sizes] once a launch


class CostEstimate(struct.PyTreeNode):
    """A table, and what launches have shown of it. Corrections are logarithms of ratios."""

    table: CostTable
    correction: Array  # f32[sizes, buckets + 1] of each bucket, and of drafts
    pace: Array  # f32[] of all launches; NaN before the first launch where nothing was measured


class RoundCosts(NamedTuple):
    """Seconds at one batch size and context."""

    verify: Array  # f32[buckets]
    draft: Array  # f32[D+1]
    catch_up: Array  # f32[]


class Point(NamedTuple):
    """A launch to measure, with every row at `context`."""

    rows: int
    bucket: int  # 0 is plain decoding
    context: int
    steps: int
    unread: int  # positions that the drafter has not read
    rounds: int


def contexts(limits: Limits) -> tuple[int, int]:
    """Returns the two contexts of a table."""
    return min(SHORTEST, limits.longest), limits.longest


def default_table(limits: Limits) -> CostTable:
    """Returns the ratios of a platform, in arbitrary units."""
    ratios = RATIOS[limits.platform]
    widest = max(map(len, limits.buckets.values()))
    packed = np.asarray([[b.packed for b in (*of, *[of[-1]] * (widest - len(of)))]
                         for of in limits.buckets.values()], np.float32)
    verify = 1e-3 * (ratios.tokens + packed)
    draft = ratios.draft * verify[:, :1] * np.arange(limits.depth + 1)
    both = np.ones(2, np.float32)
    return carrier(CostTable, verify=(verify[..., None] * both).astype(np.float32),
                   draft=(draft[..., None] * both).astype(np.float32),
                   catch_up=(0.01 * verify[:, 0]).astype(np.float32),
                   launch=np.zeros(len(packed), np.float32))


def estimate(costs: CostTable | None, limits: Limits) -> CostEstimate:
    """Returns an estimate without corrections; None is the default table, of unknown pace."""
    table = default_table(limits) if costs is None else costs
    sizes, buckets, _ = table.verify.shape
    return carrier(CostEstimate, table=table, pace=np.float32(math.nan if costs is None else 0),
                   correction=np.zeros((sizes, buckets + 1), np.float32))


def at(costs: CostEstimate, limits: Limits, rows: int, context: Array) -> RoundCosts:
    """Returns what a round of `rows` slots costs at a context f32[], by the pace of 1."""
    size, buckets = list(limits.buckets).index(rows), len(limits.buckets[rows])
    low, high = contexts(limits)
    share = jnp.clip((context - low) / max(high - low, 1), 0.0, 1.0)
    verify, draft = ((1 - share) * a[size, ..., 0] + share * a[size, ..., 1]
                     for a in (costs.table.verify, costs.table.draft))
    scale = jnp.exp(costs.correction[size])
    return RoundCosts(jax.lax.cummax(verify[:buckets] * scale[:buckets]), draft * scale[-1],
                      costs.table.catch_up[size] * scale[-1])


def plain_round_seconds(table: CostTable, limits: Limits) -> dict[int, float]:
    """Returns the seconds of a plain round halfway along the context, by batch size."""
    return {rows: float(table.verify[i, 0].mean()) for i, rows in enumerate(limits.buckets)}


def learn(costs: CostEstimate, limits: Limits, launch: LaunchRecord, spent: np.ndarray,
          online: bool) -> tuple[CostEstimate, dict[str, float]]:
    """Corrects an estimate by one launch, on the host, unless `online` is False.

    Least mean squares on logarithms: the pace follows what is common to all launches, and each
    bucket keeps a little of the surprises of the launches that it dominates.

    Args:
      spent: f32[buckets + 2] expected seconds at the pace of 1: in each bucket, for drafts, and had
        the rounds been plain.

    Returns:
      The estimate, and expected seconds: of the launch, of the same tokens in plain rounds, and
      what drafts and their verification add to plain rounds.
    """
    size = list(limits.buckets).index(launch.batch)
    parts, plain = np.asarray(spent[:-1], np.float64), float(spent[-1])
    overhead = float(costs.table.launch[size])
    expected = max(float(parts.sum()) + overhead, 1e-9)
    pace = float(costs.pace)
    if math.isnan(pace):
        pace = math.log(launch.seconds / expected)
    scale, tokens = math.exp(pace), launch.committed / max(launch.row_rounds, 1)
    report = {"predicted_seconds": scale * expected,
              "plain_seconds": scale * (plain * tokens + overhead),
              "speculation_seconds": scale * (float(parts.sum()) - plain)}
    if online:
        surprise = math.log(launch.seconds / expected) - pace
        surprise = min(max(surprise, -MOST), MOST)
        correction = np.array(costs.correction)
        correction[size] = np.clip(correction[size] + LEARN * surprise * parts / expected,
                                   -MOST, MOST)
        pace += FOLLOW * surprise
        costs = costs.replace(correction=correction)
    return costs.replace(pace=np.float32(pace)), report


# Measuring.


def points(limits: Limits, rows: int, rounds: int, reads: bool) -> list[Point]:
    """Returns the launches to measure for the fit of one batch size.

    Rounds of wider buckets draft one step, as in use; only short ones are measured at both
    contexts.

    Args:
      rounds: of each launch.
      reads: whether the drafter must read positions that it has not seen.
    """
    low, high = contexts(limits)
    wider = range(1, len(limits.buckets[rows]))
    chosen = [Point(rows, 0, low, 0, 0, rounds), Point(rows, 0, high, 0, 0, rounds),
             Point(rows, 0, low, 0, 0, rounds - 1)]
    if wider:
        chosen += [Point(rows, 0, low, steps, 0, rounds) for steps in {1, limits.depth}]
        chosen += [Point(rows, b, low, 1, 0, rounds) for b in wider]
        if rounds > 1:
            chosen.append(Point(rows, wider[-1], high, 1, 0, rounds))
        if reads:
            chosen.append(Point(rows, 0, high, 1, high // 2, rounds))
    return list(dict.fromkeys(chosen))


def fit(measured: Mapping[Point, float], limits: Limits) -> CostTable:
    """Returns the table from the seconds of the launches of `points`, of all batch sizes."""
    blank = default_table(limits)
    verify, draft, catch_up, launch = map(np.array, jax.tree.leaves(blank))
    for size, rows in enumerate(limits.buckets):
        of_size = {point: seconds for point, seconds in measured.items() if point.rows == rows}
        of_buckets, draft[size], catch_up[size], launch[size] = _fit_size(of_size, limits, rows)
        verify[size, : len(of_buckets)], verify[size, len(of_buckets):] = of_buckets, of_buckets[-1]
    return blank.replace(verify=verify, draft=draft, catch_up=catch_up, launch=launch)


def _fit_size(measured: Mapping[Point, float], limits: Limits, rows: int
              ) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Returns verify f[buckets, 2], draft f[D+1, 2], catch_up and launch."""
    (low, high), buckets = contexts(limits), limits.buckets[rows]
    rounds, levels = max(point.rounds for point in measured), np.arange(limits.depth + 1)

    def seconds(bucket: int, context: int, steps: int, unread: int = 0, n: int = rounds) -> float:
        return measured[Point(rows, bucket, context, steps, unread, n)]

    full, shorter = seconds(0, low, 0), seconds(0, low, 0, n=rounds - 1)
    launch = min(max(0.0, shorter - (rounds - 1) * (full - shorter)), 0.9 * full)
    plain = np.asarray([seconds(0, c, 0) - launch for c in (low, high)]) / rounds
    if len(buckets) == 1 or not limits.depth:
        return monotone(plain[None]), np.zeros((len(levels), 2)), 0.0, launch
    step, deepest = (max(0.0, seconds(0, low, s) - full) / rounds for s in (1, limits.depth))
    drafts = np.interp(levels, [0, 1, limits.depth], [0, step, max(step, deepest)])
    draft = np.maximum(drafts[:, None], LEAST_STEP * levels[:, None] * np.maximum.accumulate(plain))
    at_high = seconds(0, high, 0) + rounds * step  # a plain round that drafts a step
    extra = [max(0.0, seconds(b, low, 1) - seconds(0, low, 1)) / rounds
             for b in range(1, len(buckets))]
    further = 0.0 if rounds == 1 else max(
        0.0, seconds(len(buckets) - 1, high, 1) - at_high) / rounds - extra[-1]
    width = np.asarray([b.packed for b in buckets[1:]], float) - rows
    verify = plain + np.stack([extra, extra + further * width / max(width[-1], 1)], 1)
    read = Point(rows, 0, high, 1, high // 2, rounds)
    catch_up = max(0.0, measured[read] - at_high) / (high // 2) if read in measured else 0.0
    return monotone(np.concatenate([plain[None], verify])), draft, catch_up, launch


def monotone(values: np.ndarray) -> np.ndarray:
    """Returns the least matrix above `values` that falls along neither axis, and is positive."""
    return np.maximum.accumulate(np.maximum.accumulate(np.maximum(values, 1e-9), 0), 1)
