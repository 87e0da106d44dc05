"""Each drafter that a run may use, in trees that change every launch: plain decoding's tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from eagle_slots import ACTOR, ACTOR_PARAMS, ARCH, parameters
from helpers import (
    Course,
    ask,
    make_engine,
    make_task,
    roll_out,
    said,
    streams,
    tiny_params,
    wandering,
)

from specrl_jax.control.protocol import make_spec
from specrl_jax.draft.draft_model import draft_model
from specrl_jax.draft.eagle import eagle
from specrl_jax.draft.history import history
from specrl_jax.draft.merge import merge
from specrl_jax.draft.protocol import Drafter
from specrl_jax.rollout.engine import Result
from specrl_jax.runtime.compilation import CompilationCounter

DEPTH, BRANCH, NODES = 3, 2, 7
SIZES = {"depth": DEPTH, "branch": BRANCH, "nodes": NODES}
TASK = make_task(stop=(3,))
NEAR = jax.tree.map(lambda a, b: a + 0.05 * b, ACTOR_PARAMS, tiny_params(ACTOR, seed=9))
MIXES: dict[str, dict[str, Any]] = {
    "plain": {}, "greedy": {"temperature": 0},
    "truncated": {"temperature": 1.7, "top_k": 9, "top_p": 0.8},
    "every row its own": {"temperature": np.linspace(0, 2, 12), "limit": 1 + np.arange(12)}}


def merged() -> Drafter:
    parts = (draft_model(ACTOR, **SIZES, origin=0),
             history(**SIZES, match=4, group=TASK.group, origin=1))
    return merge(parts, NODES)


DRAFTERS: dict[str, tuple[Callable[[], Drafter], Any]] = {
    "history": (lambda: history(**SIZES, match=4, group=TASK.group), ()),
    "merge": (merged, (NEAR, ())),
    "draft_model": (lambda: draft_model(ACTOR, **SIZES), NEAR)} | {
    f"eagle, {children}": (functools.partial(eagle, ARCH, **SIZES, children=children),
                           parameters()) for children in ("perturbed", "top", "sampled")}


@functools.cache
def plain(mix: str) -> Result:
    engine = _plain_engine()
    return roll_out(engine, ACTOR_PARAMS, ask(TASK, seed=1, **MIXES[mix]))


@functools.cache
def _plain_engine() -> Any:
    engine = make_engine(ACTOR, TASK, batch=5, truncates=True)
    engine.compile(ACTOR_PARAMS)
    return engine


IN_CI = ("history", "eagle, perturbed")  # each compiles an engine, so the others are full


@pytest.mark.ci
@pytest.mark.parametrize("name", [
    name if name in IN_CI else pytest.param(name, marks=pytest.mark.full)
    for name in DRAFTERS])
def test_no_drafter_changes_a_token(name: str) -> None:
    """Batches of 4 and then 2, with refill; depth, nodes, branching, budget and mixture change."""
    make, own = DRAFTERS[name]
    drafter = make()
    parts = len(drafter.names)
    course = Course(NODES, DEPTH, parts)
    engine = make_engine(ACTOR, TASK, drafter=drafter, controller=wandering(course), batch=4,
                         min_batch=2, past=TASK.group, max_packed=8, truncates=True)
    bound = drafter.bind(ACTOR_PARAMS, jax.tree.map(jax.numpy.asarray, own))
    engine.compile(ACTOR_PARAMS, bound)
    counter = CompilationCounter()
    accepted, batches = dict.fromkeys(drafter.names, 0), set()
    for mix, sampling in MIXES.items():
        want = plain(mix)
        past = np.where(said(want), want.sequences.tokens, -1).reshape(6, TASK.group, -1)
        for hold in (None, make_spec(DEPTH, BRANCH, NODES, 0, (1.0,) * parts)):
            course.hold = hold
            asked = ask(TASK, seed=1, past=past.astype(np.int32), **sampling)
            counter.take()
            got = roll_out(engine, ACTOR_PARAMS, asked, bound, rounds=2)
            assert streams(got) == streams(want) and counter.take() == 0
            batches |= {launch.batch for launch in got.trace}
            assert list(got.by_drafter) == list(drafter.names)
            for kind in ("drafted", "accepted"):
                assert sum(of[kind] for of in got.by_drafter.values()) == got.counters[kind]
            for part, counts in got.by_drafter.items():
                assert counts["accepted"] <= counts["drafted"]
                accepted[part] += counts["accepted"]
    assert min(accepted.values()) > 0 and batches == {4, 2}
