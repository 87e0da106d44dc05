"""One plain and one drafted round by themselves: what a launch repeats, compiled and counted once.

XLA counts a loop's body once and mixes the branches of a launch; a single round has neither.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.draft.tree import roots
from specrl_jax.rollout import round as one
from specrl_jax.rollout.engine import Engine
from specrl_jax.rollout.layout import ROW
from specrl_jax.rollout.plan import Pruned, Weights, buckets_of, plan_round
from specrl_jax.runtime.compilation import Program, abstract
from specrl_jax.sharding import ROWS
from specrl_jax.structs import PyTree, RolloutState

from . import count

PLAIN, DRAFTED = "plain round", "drafted round"


def programs(engine: Engine, actor: PyTree, bound: PyTree) -> Iterator[Program]:
    """Yields a plain round and, if there is a drafter, a drafted one, of the largest batch."""
    args = _args(engine, actor, bound)
    yield _program(PLAIN, engine, _plain, args)
    if _drafts(engine):
        yield _program(DRAFTED, engine, _drafted, args)


def moved(engine: Engine, actor: PyTree, bound: PyTree) -> dict[str, float]:
    """Returns the bytes, over all devices, that rounds of the largest batch move by `count`.

    `least`: weights, without an embedding that is no head, and every allocated slot, once a data
    shard; `plain`: a plain round; `verified`: a round that verifies all of a drafter's nodes of
    each row, without their drafting, if there is a drafter.
    """
    arch, args = engine.decoder.arch, _args(engine, actor, bound)
    read = {name: part for name, part in actor.items() if arch.tied or name != "embed"}
    found = {"least": engine.shapes.shards * _bytes(read) + _bytes(
        engine.layout.abstract_kv(engine.shapes.batch))}
    wide = {"verified": _verified} if _drafts(engine) else {}
    for name, function in {"plain": _plain, **wide}.items():
        program = _program(name, engine, function, args)
        found[name] = count.work(program.function.trace(*program.args)).moved
    return found


def _bytes(tree: PyTree) -> float:
    return float(sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree)))


def _drafts(engine: Engine) -> bool:
    return len(buckets_of(engine.decoder, engine.shapes.batch)) > 1


def _args(engine: Engine, actor: PyTree, bound: PyTree) -> tuple[PyTree, ...]:
    whole, rows = sharding.replicated(engine.mesh), sharding.rows(engine.mesh)
    return (actor, bound, engine.layout.abstract(engine.shapes.batch),
            abstract(jax.tree.map(np.asarray, engine.control), whole),
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


def _verified(engine: Engine, actor: PyTree, bound: PyTree, state: RolloutState, waiting: Any,
              force: Any) -> RolloutState:
    decoder = engine.decoder
    planned = plan_round(decoder, state, waiting[0], force)
    tree = roots(planned.frontier.root, planned.frontier.live, decoder.drafter.nodes)
    largest = len(buckets_of(decoder, engine.shapes.batch)) - 1
    pruned = Pruned(tree=tree, live=jnp.ones_like(tree.live), bucket=jnp.int32(largest))
    return one.drafted_round(decoder, Weights(actor, bound), state, planned, pruned)[0]
