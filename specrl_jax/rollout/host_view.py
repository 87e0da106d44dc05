"""What the host knows of a rollout between launches, and what it expects."""

import dataclasses
from typing import NamedTuple

import numpy as np

from specrl_jax.control import acceptance
from specrl_jax.control.acceptance import Acceptance
from specrl_jax.rollout.layout import RolloutRequest, Shapes
from specrl_jax.rollout.slots import Slots
from specrl_jax.structs import Counters, Json, LaunchRecord, PyTree, carrier

PER_LOOP = ("rounds", "draft_rounds", "draft_depth")  # every shard counts the loop's own
OTHERS = 1.0  # samples of its own prompt that all other prompts' are worth
LIMIT = 0.5  # and that the limit is: what runs on is what nothing is known of yet


class HostView:
    """What the host knows of a rollout between launches.

    Attributes:
      batch: rows of a shard.
      done: bool[shards, Q / shards]; length: i32[Q] tokens so far.
      slots: of each shard.
      counters: totals so far.
      outcomes: of drafts so far, fields f32[shards, drafters, D, bins].
    """

    def __init__(self, shapes: Shapes, request: RolloutRequest, cells: tuple[int, int, int]
                 ) -> None:
        self.batch, self.done = shapes.batch, request.done.reshape(shapes.shards, -1)
        self.length = request.length
        self.slots = [Slots(shapes.batch, np.flatnonzero(~of_shard), shapes.group)
                      for of_shard in self.done]
        self.counters: dict[str, int] = {}
        zero = np.zeros((shapes.shards, *cells), np.float32)
        self.outcomes = carrier(Acceptance, tried=zero, hit=zero)

    @property
    def waiting(self) -> np.ndarray:
        """i32[shards] sequences that have no slot yet."""
        return np.asarray([of_shard.waiting for of_shard in self.slots], np.int32)

    def end_launch(self, seen: PyTree, shards: int, seconds: float) -> LaunchRecord:
        """Takes up what a launch returned to the host, and returns its record."""
        finished, self.length, counters, self.outcomes = seen
        self.done, before = finished.reshape(self.done.shape), self.counters
        self.counters = total_counts(counters)
        counts: Json = {
            name: (self.counters[name] - before.get(name, 0)) // (shards if name in PER_LOOP else 1)
            for name in {field.name for field in dataclasses.fields(LaunchRecord)} & set(
                self.counters)}
        return LaunchRecord(batch=self.batch, seconds=seconds, last=bool(self.done.all()), **counts)


class Forecast:
    """What a state holds of the future: survival of drafts, and expected lengths."""

    def __init__(self, request: RolloutRequest, group: int) -> None:
        self.limit, self.group, prompts = request.limit, group, len(request.prompts)
        self.past = (np.zeros((prompts, 0), np.int32) if request.past is None
                     else (request.past >= 0).sum(2, dtype=np.int32))
        self.done = self.estimate = np.zeros(0)

    def changes(self, view: HostView, known: Acceptance) -> dict[str, np.ndarray]:
        """Returns the fields of RolloutState that are new since the last launch.

        Lengths are expected anew once a sequence has ended.

        Args:
          known: outcomes of earlier rollouts.
        """
        new, estimate = {}, acceptance.table(known, view.outcomes)
        if not np.array_equal(estimate, self.estimate):
            self.estimate = new["estimate"] = estimate
        if not np.array_equal(view.done, self.done):
            self.done = view.done
            new["expected"] = expected_lengths(
                self.limit, view.length, view.done.reshape(-1), self.past, self.group)
        return new


def expected_lengths(limit: np.ndarray, length: np.ndarray, done: np.ndarray, past: np.ndarray,
                     group: int) -> np.ndarray:
    """Returns the tokens that each sequence is expected to have in the end, f32[Q].

    They follow the prompt's earlier responses, its finished samples, and all other finished
    sequences that became longer than a running one is.

    Args: limit, length i32[Q] at most and so far, done bool[Q], past i32[Q / M, K] of earlier
      responses, where 0 pads.
    """
    ended = np.where(done, length, 0).reshape(-1, group)
    ended = np.concatenate([ended, past], 1)
    own = np.repeat(ended, group, 0)  # [Q, M + K], 0 is unknown
    longer = own > length[:, None]
    pool = np.sort(ended[ended > 0]).astype(np.float64)
    total = np.append(np.cumsum(pool[::-1])[::-1], 0.0)
    first = np.searchsorted(pool, length, side="right")
    count = len(pool) - first
    share = np.where(count > 0, OTHERS / np.maximum(count, 1), 0.0)
    mass = np.where(longer, own, 0).sum(1) + share * total[first] + LIMIT * limit
    mean = mass / (longer.sum(1) + share * count + LIMIT)
    return np.where(done, length, np.clip(mean, length + 1, limit)).astype(np.float32)


def total_counts(counters: Counters) -> dict[str, int]:
    """Returns sums over shards, and over drafters where there are several."""
    return {field.name: int(np.asarray(getattr(counters, field.name)).sum())
            for field in dataclasses.fields(counters)}


class Reliability(NamedTuple):
    """What the estimates that drafts were chosen by promised, and what was accepted, by bin."""

    tried: np.ndarray  # f64[BINS] nodes
    predicted: np.ndarray  # f64[BINS] mean estimate
    accepted: np.ndarray  # f64[BINS] share
    error: float  # expected calibration error, over all cells


def judge(seen: Acceptance, estimate: np.ndarray) -> Reliability:
    """Judges an estimate f32[drafters, D, BINS] by outcomes that it was made without."""
    tried, hit = (np.asarray(a, np.float64).sum(0) for a in (seen.tried, seen.hit))
    by_bin, expected = tried.sum((0, 1)), tried * estimate
    predicted, accepted = (np.divide(a.sum((0, 1)), by_bin, out=np.zeros_like(by_bin),
                                     where=by_bin > 0) for a in (expected, hit))
    error = float(np.abs(hit - expected).sum() / max(tried.sum(), 1))
    return Reliability(by_bin, predicted, accepted, error)
