"""One plain and one drafted round by themselves: what a launch repeats, compiled once.

XLA counts a loop's body once and mixes the branches of a launch; a single round has neither.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.rollout import round as one
from specrl_jax.rollout.engine import Engine
from specrl_jax.rollout.layout import ROW
from specrl_jax.rollout.plan import Weights, buckets_of, plan_round
from specrl_jax.runtime.compilation import Program, abstract
from specrl_jax.sharding import ROWS
from specrl_jax.structs import PyTree, RolloutState

PLAIN, DRAFTED = "plain round", "drafted round"


def programs(engine: Engine, actor: PyTree, bound: PyTree) -> Iterator[Program]:
    """Yields a plain round and, if there is a drafter, a drafted one, of the largest batch."""
    args = _args(engine, actor, bound)
    yield _program(PLAIN, engine, _plain, args)
    if _drafts(engine):
        yield _program(DRAFTED, engine, _drafted, args)


def _drafts(engine: Engine) -> bool:
    return len(buckets_of(engine.decoder, engine.shapes.batch)) > 1


def _args(engine: Engine, actor: PyTree, bound: PyTree) -> tuple[PyTree, ...]:
    whole, rows = sharding.replicated(engine.mesh), sharding.rows(engine.mesh)
    return (actor, bound, engine.layout.abstract(engine.shapes.batch),
            abstract(jax.tree.map(np.asarray, engine.initial_speculation().control), whole),
            jax.ShapeDtypeStruct((engine.shapes.shards,), jnp.int32, sharding=rows),
            jax.ShapeDtypeStruct((2,), jnp.int32, sharding=whole))


def _program(name: str, engine: Engine, function: Any, args: tuple[PyTree, ...]) -> Program:
    def run(actor: PyTree, bound: PyTree, state: RolloutState, *rest: Any) -> RolloutState:
        control, waiting, force = rest
        state = state.replace(control=control)
        return function(engine, actor, bound, state, waiting, force).replace(control=())

    specs = engine.layout.specs
    mapped = jax.shard_map(run, mesh=engine.mesh, in_specs=(P(), P(), specs, P(), ROW, P()),
                           out_specs=specs, axis_names=set(ROWS), check_vma=False)
    out = jax.tree.map(lambda a: a.sharding, engine.layout.abstract(engine.shapes.batch))
    return Program(name, jax.jit(mapped, donate_argnums=(2,), out_shardings=out), args)


def _plain(engine: Engine, actor: PyTree, bound: PyTree, state: RolloutState, waiting: Any,
           force: Any) -> RolloutState:
    decoder = engine.decoder
    return one.plain_round(decoder, Weights(actor, bound), state,
                           plan_round(decoder, state, waiting[0], force))


def _drafted(engine: Engine, actor: PyTree, bound: PyTree, state: RolloutState, waiting: Any,
             force: Any) -> RolloutState:
    decoder = engine.decoder
    planned = plan_round(decoder, state, waiting[0], force)
    weights = Weights(actor, bound)
    state, tree = one.draft(decoder, weights, state, planned)
    pruned = one.prune(decoder, state, planned, tree, force)
    state, count = one.drafted_round(decoder, weights, state, planned, pruned)
    return one.observe(decoder, state, planned, pruned, count, jnp.int32(1))
