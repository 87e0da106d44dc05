"""What a cell tells afterwards: the gain of each setting by load, and what foresight would give."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specrl_jax.rollout.engine import Result

COUNTS = ("committed", "row_rounds", "rounds")
Pace = tuple[float, float]
"""Tokens of a row in a round, and seconds of the round, on average."""


def paces(results: Iterable[Result]) -> dict[int, Pace]:
    """Of launches, by their batch size."""
    sums: dict[int, np.ndarray] = {}
    for result in results:
        before = np.zeros(len(COUNTS))
        for launch in result.trace:
            now = np.asarray([launch[name] for name in COUNTS], np.float64)
            new = np.asarray([*(now - before), launch["seconds"]])
            sums[launch["batch"]] = sums.get(launch["batch"], 0) + new
            before = now
    return {size: (tokens / rows, seconds / rounds)
            for size, (tokens, rows, rounds, seconds) in sums.items()}


def gains(paced: Mapping[str, Mapping[int, Pace]], settings: Sequence[str], sizes: Sequence[int]
          ) -> np.ndarray:
    """f32[sizes, settings] speed over `off` in launches of each batch size; NaN where one had none.

    Speed is tokens a row and round over seconds a round: settings end rows at other times, so that
    batches of one size hold more live rows with one than with another.
    """
    def speed(name: str, size: int) -> float:
        tokens, seconds = paced[name].get(size, (np.nan, np.nan))
        return tokens / seconds

    return np.asarray([[speed(name, size) / speed("off", size) for name in settings]
                       for size in sizes], np.float32)


def acceptable(chains: Mapping[int, Result], most: int) -> np.ndarray:
    """bool[Q, T] tokens that no rollout shows to be refused as a draft.

    Args:
      chains: rollouts with the same tokens, by the depth to which each always drafted a chain;
        all rows begin in their first round.
      most: tokens that a round can verify. Where it had no room for all drafts, what it refused
        may not have been drafted.
    """
    good = np.ones_like(np.asarray(next(iter(chains.values())).sequences.commits), bool)
    for depth, result in chains.items():
        commits = np.asarray(result.sequences.commits)
        fits = (commits > 0).sum(0) * (1 + depth) <= most
        rows, rounds = np.nonzero((commits > 0) & (commits <= depth) & fits)
        good[rows, np.cumsum(commits, 1)[rows, rounds] - 1] = False
    return good


def seconds_with_foresight(good: np.ndarray, length: np.ndarray, most: int,
                           costs: Mapping[int, Mapping[int, float]]) -> float:
    """Seconds until every row has said its tokens, if each round takes the depth that gives most
    tokens per second, and it is known before how many drafts of each row will be accepted.

    No bound for a whole rollout: rounds that give most tokens need not end the longest row first,
    and trees are not looked at.

    Args:
      good: bool[Q, T] tokens that are accepted as drafts.
      length: i32[Q] tokens to say.
      most: tokens that a round can verify; first steps come first, and rows that have most to say.
      costs: seconds of a round by batch size and depth; 0 is a round without drafts.
    """
    at, seconds, rows = np.zeros_like(length), 0.0, np.arange(len(length))
    while (live := rows[at < length]).size:
        depths = costs[min(size for size in costs if size >= live.size)]
        ahead = at[live, None] + np.arange(max(depths))
        room = ahead < length[live, None] - 1  # a round's last token needs no draft
        run = np.cumprod(good[live[:, None], np.minimum(ahead, good.shape[1] - 1)] & room, 1)
        best = np.inf
        longest_first = np.argsort(at[live] - length[live], kind="stable")
        for depth, takes in depths.items():
            drafts = run[longest_first, :depth].T  # one step of all rows before the next
            kept = drafts * (np.cumsum(drafts) <= most - live.size).reshape(drafts.shape)
            tokens = np.ones(live.size, int)
            tokens[longest_first] += kept.sum(0)
            if takes / tokens.sum() < best:
                best, given, took = takes / tokens.sum(), tokens, takes
        at[live] += given
        seconds += took
    return seconds
