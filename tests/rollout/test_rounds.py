"""Which rounds draft, and which are plain: the same tokens, and work for what is used alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Dice,
    ask,
    make_engine,
    make_task,
    random_drafter,
    roll_out,
    streams,
    tiny_arch,
    tiny_params,
)

from specrl_jax.control import fixed, protocol
from specrl_jax.draft.protocol import Drafter

DEPTH, NODES, BATCH = 2, 3, 4
ARCH = tiny_arch(num_layers=1)
PARAMS = tiny_params(ARCH)
TASK = make_task()
class Spied:
    """Places a row of the rounds that ran, and how many trees were drafted."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.trees = 0

    def drafter(self) -> Drafter:
        dice = Dice(np.zeros((TASK.sequences, TASK.response), np.int32), hit=0.0)
        inner = random_drafter(dice, nodes=NODES, depth=DEPTH, vocab=24)

        def propose(*args: Any) -> Any:
            jax.debug.callback(self._proposed)
            return inner.propose(*args)

        def observe(params: Any, state: Any, frontier: Any, verdict: Any, path: Any) -> Any:
            width = verdict.tokens.shape[1]
            assert path.kv.shape[0] == verdict.path.shape[1] == width
            jax.debug.callback(lambda: self.widths.append(width))
            return state

        return inner._replace(propose=propose, observe=observe)

    def _proposed(self) -> None:
        self.trees += 1


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    engine = make_engine(ARCH, TASK, batch=BATCH)
    engine.compile(PARAMS)
    return streams(roll_out(engine, PARAMS, ask(TASK)))


@pytest.mark.ci
@pytest.mark.parametrize("likely, most, ran", [
    (0.0, 64, {2: True, 0: False}), (1.0, 64, {2: False}), (0.0, BATCH, {2: False})],
    ids=["as drafted", "nothing is likely", "no room"])
def test_a_round_that_verifies_no_draft_is_a_plain_one(
        likely: float, most: int, ran: dict[int, bool], plain: list[list[int]]) -> None:
    """Off proposes nothing; what is dropped, or has no room, is not verified in a wider shape."""
    spy = Spied()
    engine = make_engine(ARCH, TASK, drafter=spy.drafter(), controller=fixed.fixed(likely),
                         batch=BATCH, max_packed=most)
    engine.compile(PARAMS)
    for steps, wider in ran.items():
        spy.widths, spy.trees = [], 0
        result = roll_out(engine, PARAMS, ask(TASK),
                          control=protocol.make_spec(steps, NODES, NODES, 0))
        jax.effects_barrier()
        assert streams(result) == plain
        drafts = steps > 0 and most > BATCH
        assert len(spy.widths) == result.counters["rounds"] > 0
        assert set(spy.widths) == {DEPTH + 1 if drafts else 1}
        assert spy.trees == (result.counters["rounds"] if drafts else 0)
        assert (result.counters["packed"] > result.counters["slots"]) == wider


@pytest.mark.ci
@pytest.mark.parametrize("least, few, many", [(8, False, True), (0, True, True)])
def test_places_of_empty_slots_verify_drafts(
        least: int, few: int, many: int, plain: list[list[int]]) -> None:
    """In the smallest batch size alone; where live rows leave too few of them, a round is wider."""
    engine = make_engine(ARCH, TASK, drafter=Spied().drafter(), controller=fixed.fixed(),
                         batch=8, smallest=least)
    engine.compile(PARAMS)
    for live, wider in ((2, few), (6, many)):  # up to three nodes each
        limit = np.where(np.arange(TASK.sequences) < live, 4, 0)
        result = roll_out(engine, PARAMS, ask(TASK, limit=limit),
                          control=protocol.make_spec(DEPTH, NODES, NODES, 0))
        assert streams(result)[:live] == [row[:4] for row in plain[:live]]
        assert result.counters["drafted"] > 0
        assert (result.counters["packed"] > result.counters["slots"]) == wider


@pytest.mark.parametrize("valid_for", [
    3, *(pytest.param(n, marks=pytest.mark.full) for n in (1, protocol.NEVER_REPLAN))])
def test_plan_stands_for_plain_rounds_until_a_row_ends(
        valid_for: int, plain: list[list[int]]) -> None:
    """The same tokens, with rows that are refilled and batches that shrink; no round is forgotten.
    """
    seen = []

    def observe(state: Any, plan: protocol.Plan, outcome: protocol.Outcome) -> Any:
        jax.debug.callback(lambda *shown: seen.append(shown), outcome.rounds, outcome.count,
                           outcome.load.live)
        return state

    spy = Spied()
    controller = fixed.fixed()._replace(
        observe=observe, plan=lambda state, load: protocol.Plan(state, jnp.int32(valid_for)))
    engine = make_engine(ARCH, TASK, drafter=spy.drafter(), batch=BATCH, min_batch=1,
                         controller=controller)
    engine.compile(PARAMS)
    result = roll_out(engine, PARAMS, ask(TASK), rounds=8)
    jax.effects_barrier()
    assert streams(result) == plain
    ran = [int(rounds) for rounds, *_ in seen]
    assert sum(ran) == result.counters["rounds"] == len(spy.widths)
    assert max(ran) == min(valid_for, 8)
    committed = np.asarray([count.sum() for _, count, _ in seen])
    assert committed.sum() == result.counters["committed"]
    assert all((count == rounds * live).all() for rounds, count, live in seen)


def test_forced_depth_drafts_whatever_is_planned(plain: list[list[int]]) -> None:
    """Nodes that the controller would drop are verified, and no plan of it is needed."""
    spy = Spied()
    engine = make_engine(ARCH, TASK, drafter=spy.drafter(), batch=BATCH,
                         controller=fixed.fixed(1.0, protocol.make_spec(1, NODES, NODES, 0)))
    engine.compile(PARAMS)
    drafted = {}
    for depth in (None, 0, DEPTH, DEPTH + 5):
        spy.trees = 0
        result = roll_out(engine, PARAMS, ask(TASK), depth=depth)
        jax.effects_barrier()
        assert streams(result) == plain
        assert result.counters["draft_rounds"] == spy.trees == sum(
            launch.draft_rounds for launch in result.trace)
        drafted[depth] = (spy.trees > 0, result.counters["drafted"] > 0)
    assert drafted == {None: (True, False), 0: (False, False), DEPTH: (True, True),
                       DEPTH + 5: (True, True)}
