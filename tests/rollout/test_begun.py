"""A rollout in passes, each of which goes on where the last one ended, equals one without."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers import (
    Course,
    Dice,
    Task,
    ask,
    assert_same,
    make_engine,
    make_task,
    random_drafter,
    roll_out,
    tiny_arch,
    tiny_params,
    wandering,
)

from specrl_jax.control import fixed, protocol
from specrl_jax.draft.history import history
from specrl_jax.rollout.engine import Engine, Result

ARCH = tiny_arch()
TASK = make_task(response=40, group=2)
NODES, DEPTH = 6, 3


def in_passes(engine: Engine, params: Any, task: Task, quota: int, control: Any = None
              ) -> tuple[Result, int]:
    """Returns a rollout of at most `quota` tokens a sequence and pass, and how many passes it had.
    """
    request = ask(task, seed=3)
    whole, passes = request.limit, 0
    while True:
        length = request.length
        result = roll_out(engine, params, dataclasses.replace(
            request, limit=np.minimum(whole, length + quota)), control=control)
        sequences, passes = result.sequences, passes + 1
        assert (sequences.length - length <= quota).all()
        stopped = (sequences.length < np.minimum(whole, length + quota)) & (whole > 0)
        last = sequences.tokens[np.arange(len(whole)), np.maximum(sequences.length - 1, 0)]
        stopped |= np.isin(last, task.stop) & (sequences.length > 0)
        whole = np.where(stopped, sequences.length, whole)
        request = dataclasses.replace(request, begun=sequences, limit=whole)
        if request.done.all():
            return result, passes


@pytest.fixture(scope="module")
def params() -> Any:
    return tiny_params(ARCH)


@pytest.fixture(scope="module")
def whole(params: Any) -> Result:
    engine = make_engine(ARCH, TASK, batch=5)
    engine.compile(params)
    return roll_out(engine, params, ask(TASK, seed=3))


def engine_of(kind: str, whole: Result, batch: int) -> Engine:
    if kind == "plain":
        return make_engine(ARCH, TASK, batch=batch, feed=8)
    if kind == "history":
        return make_engine(ARCH, TASK, batch=batch, feed=8, smallest=1, drafter=history(
            depth=DEPTH, branch=1, nodes=4, match=4, group=TASK.group),
            controller=fixed.fixed(0.0))
    dice = Dice(whole.sequences.tokens, hit=0.6)
    return make_engine(ARCH, TASK, batch=batch, min_batch=2, feed=8, controller=wandering(
        Course(NODES, DEPTH)), drafter=random_drafter(
            dice, nodes=NODES, depth=DEPTH, vocab=ARCH.vocab_size))


@pytest.mark.parametrize(("kind", "batch", "quotas"), [
    ("plain", 12, (1, 7, 40)), ("plain", 5, (13,)), ("history", 4, (7,)), ("trees", 4, (3, 11))])
def test_passes_change_no_token(kind: str, batch: int, quotas: tuple[int, ...], params: Any,
                                whole: Result) -> None:
    engine = engine_of(kind, whole, batch)
    engine.compile(params)
    control = protocol.make_spec(3, 1, 4, 0) if kind == "history" else None
    for quota in quotas:
        result, passes = in_passes(engine, params, TASK, quota, control)
        assert passes == -(-int(whole.sequences.length.max()) // quota)
        assert_same(whole, result)
