"""What the host knows of a rollout between launches, and what it expects."""

import dataclasses

import numpy as np

from specrl_jax.control import acceptance
from specrl_jax.control.acceptance import Acceptance
from specrl_jax.rollout import counted, lengths
from specrl_jax.rollout.layout import RolloutRequest, Shapes
from specrl_jax.rollout.slots import Slots
from specrl_jax.structs import Json, LaunchRecord, PyTree, carrier

PER_LOOP = ("rounds", "draft_rounds", "draft_depth")  # every shard counts the loop's own


class HostView:
    """What the host knows of a rollout between launches.

    Attributes:
      batch: rows of a shard.
      done: bool[shards, Q / shards]; length: i32[Q] tokens so far.
      slots: of each shard.
      counters: totals so far.
      outcomes: of drafts so far, fields f32[shards, drafters, D, bins].
    """

    def __init__(
        self, shapes: Shapes, request: RolloutRequest, cells: tuple[int, int, int]
    ) -> None:
        self.batch, self.done = shapes.batch, request.limit.reshape(shapes.shards, -1) == 0
        self.length = np.zeros(self.done.size, np.int32)
        self.slots = [Slots(shapes.batch, int((~of_shard).sum()), shapes.group)
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
        self.counters = counted.totals(counters)
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
            new["expected"] = lengths.expected_lengths(
                self.limit, view.length, view.done.reshape(-1), self.past, self.group)
        return new
