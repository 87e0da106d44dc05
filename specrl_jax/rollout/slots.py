"""Bookkeeping of one data shard's slots on the host: which sequence is in which slot."""

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np

EMPTY = -1


@dataclasses.dataclass
class FillPlan:
    """One SlotFill of a shard before its prompts are looked up; -1 leaves a slot alone."""

    seq: np.ndarray  # i32[B] sequence that enters the slot
    source: np.ndarray  # i32[B] index in `prompts` of the prompt to write
    copy: np.ndarray  # i32[B] slot whose prompt is copied
    prompts: list[int]  # prompts to prefill


class Slots:
    """The slots of one shard. `sequences` enter in order; samples of a prompt have neighbouring
    indices."""

    def __init__(self, batch: int, sequences: Sequence[int] | np.ndarray, group: int) -> None:
        self.seq = np.full(batch, EMPTY, np.int32)
        self.group = group
        self.sequences = np.asarray(sequences, np.int32)
        self.next = 0  # of `sequences`

    @property
    def waiting(self) -> int:
        return len(self.sequences) - self.next

    def refill(self, done: np.ndarray, most_prompts: int) -> FillPlan:
        """Fills free slots with waiting sequences, prefilling at most `most_prompts` prompts.

        A prompt whose K/V still lie in some slot is copied from there: samples share one prefill.

        Args:
          done: bool[sequences].
        """
        free = [b for b in range(len(self.seq)) if self.seq[b] == EMPTY or done[self.seq[b]]]
        held = {self.seq[b] // self.group: b for b in range(len(self.seq))
                if self.seq[b] != EMPTY and b not in free}
        own = {b: self.seq[b] // self.group for b in free if self.seq[b] != EMPTY}
        plan = FillPlan(*(np.full(len(self.seq), EMPTY, np.int32) for _ in range(3)), prompts=[])
        while free and self.waiting:
            sequence = self.sequences[self.next]
            prompt = int(sequence) // self.group
            slot = next((b for b in free if own.get(b) == prompt), free[0])
            if own.get(slot) == prompt:
                plan.copy[slot] = slot
                held[prompt] = slot
            elif prompt in held:
                plan.copy[slot] = held[prompt]
            elif prompt in plan.prompts or len(plan.prompts) < most_prompts:
                if prompt not in plan.prompts:
                    plan.prompts.append(prompt)
                plan.source[slot] = plan.prompts.index(prompt)
            else:
                break
            plan.seq[slot] = self.seq[slot] = sequence
            free.remove(slot)
            self.next += 1
        return plan

    def new_prompts(self, done: np.ndarray) -> int:
        """Returns how many prompts a refill of all free slots would prefill."""
        return len(copy.deepcopy(self).refill(done, len(self.seq)).prompts)

    def compact(self, batch: int, done: np.ndarray) -> np.ndarray:
        """Moves the live slots, in order, to a smaller batch; returns their old indices."""
        live = [b for b in range(len(self.seq)) if self.seq[b] != EMPTY and not done[self.seq[b]]]
        rest = [b for b in range(len(self.seq)) if b not in live]
        kept = np.asarray((live + rest)[:batch], np.int32)
        self.seq = self.seq[kept]
        return kept

    def has_free(self, done: np.ndarray) -> bool:
        return self.live(done) < len(self.seq)

    def live(self, done: np.ndarray) -> int:
        return sum(int(s != EMPTY and not done[s]) for s in self.seq)
