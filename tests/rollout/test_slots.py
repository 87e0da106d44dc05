"""Seating: every sequence once, prompts copied only from where they still lie."""

import numpy as np
import pytest

from specrl_jax.rollout.slots import EMPTY, FillPlan, Slots


class Simulation:
    """A rollout's bookkeeping: what prompt's K/V each slot holds, from what the plans say."""

    def __init__(self, batch: int, prompts: int, group: int, seed: int) -> None:
        self.slots = Slots(batch, range(prompts * group), group)
        self.rng = np.random.default_rng(seed)
        self.done = np.zeros(prompts * group, bool)
        self.group, self.holds = group, [EMPTY] * batch
        self.seated: list[int] = []
        self.prefilled: list[int] = []

    def refill(self, most: int) -> FillPlan:
        before, seq_before = list(self.holds), self.slots.seq.copy()
        plan = self.slots.refill(self.done, most)
        assert len(plan.prompts) <= most and len(set(plan.prompts)) == len(plan.prompts)
        for slot, seq in enumerate(plan.seq):
            if seq == EMPTY:
                assert plan.source[slot] == plan.copy[slot] == EMPTY
                continue
            self.check_seat(slot, int(seq), plan, before, seq_before)
        assert set(plan.source.tolist()) - {EMPTY} == set(range(len(plan.prompts)))
        seated = sorted(s for s in plan.seq.tolist() if s != EMPTY)
        assert seated == list(range(self.slots.next - len(seated), self.slots.next))
        self.prefilled += plan.prompts
        return plan

    def check_seat(self, slot: int, seq: int, plan: FillPlan, before: list[int],
                   seq_before: np.ndarray) -> None:
        prompt = seq // self.group
        assert seq_before[slot] == EMPTY or self.done[seq_before[slot]], "a live row was unseated"
        assert (plan.source[slot] == EMPTY) != (plan.copy[slot] == EMPTY), "one way to get a prompt"
        if plan.copy[slot] == EMPTY:
            assert plan.prompts[plan.source[slot]] == prompt
        else:
            origin = int(plan.copy[slot])
            assert before[origin] == prompt, "copied from a slot that holds another prompt"
            assert origin == slot or plan.seq[origin] == EMPTY or plan.copy[origin] == origin, (
                "copied from a slot that is overwritten in the same call")
        self.holds[slot] = prompt
        self.seated.append(seq)

    def finish_some(self) -> None:
        live = [int(s) for s in self.slots.seq if s != EMPTY and not self.done[s]]
        for seq in live:
            self.done[seq] |= bool(self.rng.random() < 0.5)
        if live:
            self.done[live[0]] = True

    def compact(self) -> None:
        live = self.slots.live(self.done)
        smaller = -(-len(self.slots.seq) // 2)
        if self.slots.waiting == 0 and live <= smaller < len(self.slots.seq):
            held = {int(s) for s in self.slots.seq if s != EMPTY and not self.done[s]}
            old = self.slots.seq.copy()
            take = self.slots.compact(smaller, self.done)
            assert len(take) == smaller == len(set(take.tolist()))
            assert (old[take] == self.slots.seq).all()
            assert held <= set(self.slots.seq.tolist()), "a live row was dropped"
            self.holds = [self.holds[i] for i in take]


@pytest.mark.parametrize("batch,prompts,group", [
    (1, 3, 1), (4, 3, 2), (7, 6, 4), (5, 2, 8), (16, 2, 4), (3, 9, 3)])
def test_every_sequence_is_seated_once_with_its_own_prompt(
        batch: int, prompts: int, group: int) -> None:
    for seed in range(25):
        sim = Simulation(batch, prompts, group, seed)
        most = max(1, seed % 4)
        for _ in range(10_000):
            while sim.slots.waiting and sim.slots.has_free(sim.done):
                assert (sim.refill(most).seq != EMPTY).any(), "no progress"
            if sim.done.all():
                break
            sim.finish_some()
            sim.compact()
        assert sorted(sim.seated) == list(range(prompts * group)) and sim.slots.waiting == 0


def test_one_shard_runs_no_padding_prompts(bench, monkeypatch):
    """Five slots of two samples: prefills of one prompt and of three are compiled."""
    run, seat = [], bench.plain._seat

    def watched(weights, state, fill, tokens):
        run.append((len(tokens[0]), min(p for p, _ in bench.plain.shapes.prefills
                                        if p >= len(tokens[0]))))
        return seat(weights, state, fill, tokens)

    monkeypatch.setattr(bench.plain, "_seat", watched)
    bench.run_plain(limit=np.full(12, 1))  # all end at once: two new prompts, and one that is held
    assert {3, 1} <= {used for used, _ in run}
    assert all(used == compiled for used, compiled in run if used)
