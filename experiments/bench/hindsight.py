"""What a cell tells afterwards: the gain of each setting by load, and what foresight would give."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specrl_jax.control import cost
from specrl_jax.control.cost import Table
from specrl_jax.rollout.engine import Result

COUNTS = ("committed", "row_rounds", "rounds")


def gains(results: Mapping[str, Sequence[Result]], settings: Sequence[str], sizes: Sequence[int]
          ) -> np.ndarray:
    """f32[sizes, settings] speed over `off` in launches of each batch size; NaN where none was.

    Speed is tokens a row and round over seconds a round: settings end rows at other times, so that
    batches of one size hold more live rows with one than with another.
    """
    speeds = {name: _speeds(of) for name, of in results.items()}
    return np.asarray([[speeds[name].get(size, np.nan) / speeds["off"].get(size, np.nan)
                        for name in settings] for size in sizes], np.float32)


def _speeds(results: Iterable[Result]) -> dict[int, float]:
    """By batch size."""
    sums: dict[int, np.ndarray] = {}
    for result in results:
        before = np.zeros(len(COUNTS))
        for launch in result.trace:
            now = np.asarray([launch[name] for name in COUNTS], np.float64)
            new = np.asarray([*(now - before), launch["seconds"]])
            sums[launch["batch"]] = sums.get(launch["batch"], 0) + new
            before = now
    return {size: tokens / rows / (seconds / rounds)
            for size, (tokens, rows, rounds, seconds) in sums.items()}


def ceiling(chain: Result, depth: int, tables: Mapping[str, Table], context: float) -> float:
    """Speed over plain decoding, by the tables, of one who knows before each round what of its
    drafts would be accepted, verifies no other node, and takes the depth and bucket that give most
    tokens per second of that round.

    No policy can know that: this is no bound that one is judged by. A draft of which the record
    tells nothing counts as accepted.

    Args:
      chain: a rollout that always drafted chains of `depth`.
      context: at which the tables are read.
    """
    good, length = _acceptable(chain, depth), np.asarray(chain.sequences.length)
    priced = {int(size): (np.asarray(table.packed), *map(np.asarray, cost.at(table, context)))
              for size, table in tables.items()}
    return _simulate(good, length, 0, priced) / _simulate(good, length, depth, priced)


def _acceptable(chain: Result, depth: int) -> np.ndarray:
    """bool[Q, T] tokens that were accepted, or that no draft was made for."""
    commits = np.asarray(chain.sequences.commits)
    good = np.ones_like(commits, bool)
    for row, rounds in enumerate(commits):
        ends = np.cumsum(rounds[rounds > 0])
        refused = ends[rounds[rounds > 0] <= depth] - 1
        good[row, refused] = False
    return good


def _simulate(good: np.ndarray, length: np.ndarray, depth: int,
              priced: Mapping[int, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> float:
    """Seconds until all rows have said `length` i32[Q] tokens, at depths up to `depth`."""
    at, seconds = np.zeros_like(length), 0.0
    rows, steps = np.arange(len(length)), np.arange(depth)
    while (live := rows[at < length]).size:
        packed, verify, draft = priced[min(size for size in priced if size >= live.size)]
        ahead = at[live, None] + steps
        room = ahead < length[live, None] - 1  # a round's last token needs no draft
        run = np.cumprod(good[live[:, None], np.minimum(ahead, good.shape[1] - 1)] & room, 1)
        best, most, kept = np.inf, 0, np.zeros(live.size, int)
        for d in range(depth + 1):
            drafted = run[:, :d].sum(1)
            for width, takes in zip(packed, verify, strict=True):
                fits = np.minimum(drafted, np.maximum(width - live.size - (
                    np.cumsum(drafted) - drafted), 0)).astype(int)
                tokens, took = live.size + int(fits.sum()), takes + draft[d]
                if width >= live.size and took * most < best * tokens:
                    best, most, kept = took, tokens, fits
        at[live] += 1 + kept
        seconds += float(best)
    return seconds
