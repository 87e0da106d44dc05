"""Replayed streams: their corruption and cost are what was asked, and tokens stay plain ones."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Course,
    ask,
    make_engine,
    make_task,
    roll_out,
    said,
    streams,
    tiny_arch,
    tiny_params,
    wandering,
)
from studies.recorded import replay, replay_params

from specrl_jax import sharding
from specrl_jax.config import MeshConfig
from specrl_jax.control.protocol import make_spec
from specrl_jax.draft.protocol import DraftRequest, RolloutInfo
from specrl_jax.rollout.engine import Result
from specrl_jax.structs import Frontier, Sampling

DEPTH, NODES, V = 3, 4, 24
ARCH = tiny_arch()
PARAMS = tiny_params(ARCH)
WHOLE = make_spec(DEPTH, 1, NODES, 0)


class Bench:
    """Plain decoding, and replays of it under settings that keep changing."""

    def __init__(self) -> None:
        self.task, self.course = make_task(), Course(NODES, DEPTH)
        self.plain = make_engine(ARCH, self.task, batch=5, truncates=True)
        self.plain.compile(PARAMS)
        self.replay_params = make_engine(
            ARCH, self.task, drafter=replay(depth=DEPTH, nodes=NODES, vocab=V), batch=4,
            min_batch=2, past=self.task.group, controller=wandering(self.course),
            truncates=True)
        self.replay_params.compile(PARAMS, self.knobs(0))

    def knobs(self, corruption: float, cost: int = 0) -> Any:
        place = sharding.replicated(sharding.make_mesh(MeshConfig()))
        return jax.device_put(replay_params(corruption, cost), place)

    def record(self, **mix: Any) -> Result:
        return roll_out(self.plain, PARAMS, ask(self.task, **mix))

    def run(self, record: Result, corruption: float, cost: int = 0, hold: Any = WHOLE, **mix: Any
            ) -> Result:
        self.course.hold = hold
        past = np.where(said(record), record.sequences.tokens, -1).astype(np.int32)
        asked = ask(self.task, past=past.reshape(-1, self.task.group, past.shape[1]), **mix)
        return roll_out(self.replay_params, PARAMS, asked, self.knobs(corruption, cost), rounds=2)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def tried(result: Result) -> tuple[float, float]:
    """Nodes whose outcome is known, and the accepted share of them."""
    by_bin, _, share, _ = result.calibration
    return by_bin.sum(), (by_bin * share).sum() / max(by_bin.sum(), 1)


@pytest.mark.ci
@pytest.mark.parametrize("corruption", [0.0, 1.0])
def test_corruption_of_none_or_all_accepts_all_or_none(bench: Bench, corruption: float) -> None:
    plain = bench.record(seed=3)
    result = bench.run(plain, corruption, seed=3)
    assert streams(result) == streams(plain)
    nodes, share = tried(result)
    assert nodes > 50 and share == 1 - corruption
    rounds = plain.sequences.length if corruption else -(-plain.sequences.length // (DEPTH + 1))
    np.testing.assert_array_equal(result.sequences.rounds, rounds)


# What it proposes.


@functools.cache
def compiled(depth: int = DEPTH) -> Any:
    drafter = replay(depth=depth, nodes=depth + 1, vocab=V, origin=1)
    return drafter, jax.jit(drafter.propose)


def believed(parent: Any, draft_prob: Any, depth: Any, origin: Any) -> Any:
    return parent * draft_prob


def propose(record: np.ndarray, corruption: float, generated: Any = 0, steps: int = DEPTH,
            cost: int = 0, key: int = 0, live: Any = True) -> Any:
    """Trees of rows that hold the sequences in order."""
    q, buffer = record.shape
    whole = np.zeros(q, np.int32)
    drafter, function = compiled()
    state = drafter.init(RolloutInfo(
        prompt=np.zeros((q, 4), np.int32), prompt_length=whole + 4, past=record[:, None], batch=q,
        group=1, buffer=buffer, cache=64))
    frontier = Frontier(root=whole + 7, seq=np.arange(q, dtype=np.int32), context=whole + 4,
                        generated=whole + generated, live=np.broadcast_to(np.asarray(live), q))
    words = np.random.default_rng(key).integers(0, 2**32, (q, 2)).astype(np.uint32)
    rows = Sampling(temperature=whole, top_p=whole, top_k=whole, limit=whole, key=words,
                    stop=np.full(1, -1, np.int32))
    tree, after = function(replay_params(corruption, cost), state, DraftRequest(
        *jax.tree.map(jnp.asarray, (frontier, rows)), make_spec(steps, 1, NODES, 0), believed))
    np.testing.assert_array_equal(after, state)
    return jax.tree.map(np.asarray, tree)


RECORD = np.random.default_rng(0).integers(0, V, (300, 9)).astype(np.int32)


def test_the_chain_continues_the_recording() -> None:
    generated = np.arange(300) % 9
    record = np.where(np.arange(9)[None] < 8, RECORD, -1)
    tree = propose(record, 0.0, generated)
    for q, at in enumerate(generated):
        want = record[q, at : at + DEPTH]
        want = want[want >= 0]
        assert tree.live[q].tolist() == [n <= len(want) for n in range(NODES)]
        np.testing.assert_array_equal(tree.tokens[q, 1 : 1 + len(want)], want)
    np.testing.assert_array_equal(tree.parent[0], [0, 0, 1, 2])
    np.testing.assert_array_equal(tree.depth[0], [0, 1, 2, 3])
    assert (tree.origin[:, 1:][tree.live[:, 1:]] == 1).all() and (tree.tokens[:, 0] == 7).all()
    assert (tree.survival[0] == 1).all()


def test_corruption_is_a_function_of_key_and_position() -> None:
    whole = propose(RECORD, 0.4)
    spoilt = whole.tokens[:, 1:] != RECORD[:, :DEPTH]
    assert 0.35 < spoilt.mean() < 0.45
    assert (whole.tokens >= 0).all() and (whole.tokens < V).all()
    later = propose(RECORD, 0.4, generated=1)
    np.testing.assert_array_equal(later.tokens[:, 1:3], whole.tokens[:, 2:4])
    other = propose(RECORD, 0.4, key=1)
    assert ((other.tokens[:, 1:] != RECORD[:, :DEPTH]) != spoilt).any()
    assert (propose(RECORD, 1.0).tokens[:, 1:] != RECORD[:, :DEPTH]).all()
    np.testing.assert_allclose(whole.survival[:, 1:], [[0.6, 0.36, 0.216]] * 300, rtol=1e-5)
