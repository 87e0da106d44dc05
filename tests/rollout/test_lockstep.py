"""What plain decoding would have taken is what it takes."""

import collections

import numpy as np
import pytest
from helpers import ask, make_engine, make_task, tiny_arch, tiny_params

from specrl_jax import sharding
from specrl_jax.config import MeshConfig
from specrl_jax.control.protocol import Stretch
from specrl_jax.rollout.lockstep import plain_rounds

ARCH = tiny_arch(num_layers=1)


@pytest.mark.parametrize("shards, batch, rounds", [(1, 4, 32), (1, 16, 3), (2, 8, 32)])
def test_rounds_are_those_of_a_plain_rollout(shards: int, batch: int, rounds: int) -> None:
    """With rows that wait and without, of one shard and two; limits 0 are not asked for."""
    task = make_task()
    mesh = sharding.make_mesh(MeshConfig(data=shards))
    engine = make_engine(ARCH, task, batch=batch, min_batch=1, mesh=mesh)
    params = engine.everywhere(tiny_params(ARCH))
    engine.compile(params)
    limit = np.random.default_rng(1).integers(1, task.response + 1, task.sequences)
    limit[-1] = 0
    result = engine.run(params, ask(task, limit=limit), rounds=rounds)
    really: collections.Counter = collections.Counter()
    before = 0
    for launch in result.trace:
        really[launch["batch"]] += (launch["rounds"] - before) // shards
        before = launch["rounds"]
    split = (shards, engine.shapes.sequences)
    prompt = np.repeat([len(p) for p in task.prompts], task.group)
    found = plain_rounds(result.sequences.length.reshape(split), prompt.reshape(split),
                         engine.shapes.batches)
    told: collections.Counter = collections.Counter()
    for stretch in found:
        told[stretch.batch] += stretch.rounds
    assert told == +really and len(told) > 1


def test_contexts_are_those_of_live_rows() -> None:
    """Prompts of 5 and 9 tokens, the last of which is the first root; rows of 3 and 1 tokens."""
    assert plain_rounds(np.asarray([[3, 1]]), np.asarray([[5, 9]]), (2, 1)) == [
        Stretch(2, 1, 6.0), Stretch(1, 2, 5.5)]
