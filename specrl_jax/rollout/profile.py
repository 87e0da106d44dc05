"""Measures what rounds cost with the compiled launches that rollouts run.

Nothing is compiled for it, and no controller learns from it.
"""

import dataclasses
import importlib.metadata as metadata
import os
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from specrl_jax import sharding
from specrl_jax.config import ConfigError
from specrl_jax.control import cost_file, cost_model
from specrl_jax.control.cost_model import CostTable, Point
from specrl_jax.control.protocol import Limits
from specrl_jax.rollout.engine import Engine, agreed
from specrl_jax.rollout.plan import Weights, buckets_of
from specrl_jax.runtime.machine import cores, processor
from specrl_jax.structs import DrafterParams, Json, Params, RolloutState

SECONDS = 2.5  # of all measured launches; a batch size is measured at least once
MOST_SWEEPS = 9  # over the launches of a batch size
ROUNDS = 2  # of a measured launch. A launch of plain rounds has one decision, whatever its rounds
LONG = 0.02  # seconds of a round, above which a decision is below 2 %: measured launches have one
ENDLESS = 2**30  # tokens that a row may generate in a measured launch; none is kept beyond T


def limits_of(engine: Engine) -> Limits:
    """Returns what cost tables of an engine are about."""
    drafter, shapes = engine.decoder.drafter, engine.shapes
    return Limits(depth=drafter.depth, branch=drafter.branch, nodes=drafter.nodes, mix=(),
                  buckets={rows: buckets_of(engine.decoder, rows) for rows in shapes.batches},
                  longest=shapes.longest)


def key(engine: Engine, about: Json) -> Json:
    """Returns what a measurement holds for; `about` describes the drafter."""
    device, decoder = engine.mesh.devices.flat[0], engine.decoder
    return {"device": f"{device.platform} {device.device_kind} {processor()}",
            "cores": cores(), "flags": os.environ.get("XLA_FLAGS", ""),
            "jax": jax.__version__, "jaxlib": metadata.version("jaxlib"),
            "model": dataclasses.asdict(decoder.arch), "invariant": decoder.invariant,
            "attention": decoder.implementation, "mesh": dict(engine.mesh.shape),
            "dtype": str(np.dtype(engine.layout.dtype)),
            "shapes": dataclasses.asdict(engine.shapes), "rule": decoder.rule,
            "truncates": decoder.truncates, **({"min_p": decoder.min_p} if decoder.min_p else {}),
            **({} if decoder.repetition_penalty == 1 else {"repetition": True}),
            "buckets": [[rows, *b] for rows, of in limits_of(engine).buckets.items() for b in of],
            "drafter": dict(about)}


def stored(engine: Engine, path: str, about: Json, since: float = 0.0
           ) -> CostTable | None:
    """Returns the costs in a file, in every process those of process 0; see `cost_file.load`.

    An empty `path` is that of a file in the user's cache directory.
    """
    wanted, blank = key(engine, about), cost_model.default_table(limits_of(engine))
    file = cost_file.path_of(path, wanted) if jax.process_index() == 0 else None
    try:
        stored_costs = file and cost_file.load(file, wanted, blank, since)
    except ConfigError:
        if path:
            raise
        stored_costs = None  # a damaged file of the cache, which is replaced
    known = agreed(np.float32(stored_costs is not None))
    return agreed(blank if stored_costs is None else stored_costs) if known else None


def measured(engine: Engine, params: Params, drafter_params: DrafterParams, path: str,
             about: Json) -> CostTable:
    """Measures the costs of all batch sizes, and writes the file of `stored`."""
    limits, measured_seconds = limits_of(engine), {}
    launches = Launches(engine, Weights(params, drafter_params))
    for rows in engine.shapes.batches:
        rounds = 1 if launches.warm_up(rows) > LONG else ROUNDS
        measured_seconds |= least_seconds(
            launches.run, cost_model.points(limits, rows, rounds,
                                            engine.decoder.drafter.needs_catch_up),
            SECONDS / len(engine.shapes.batches))
    costs = cost_model.fit(measured_seconds, limits)
    if jax.process_index() == 0:
        wanted = key(engine, about)
        if file := cost_file.path_of(path, wanted):
            cost_file.store(file, wanted, costs)
    return costs


def least_seconds(run: Callable[[Point], float], points: Sequence[Point], allowed: float
                  ) -> dict[Point, float]:
    """Returns the least of what `run` returns for each point, over one or more sweeps.

    Another sweep starts only if it is expected to end within the `allowed` seconds.
    """
    sweeps, spent = [], 0.0
    while not sweeps or (len(sweeps) < MOST_SWEEPS
                         and spent * (len(sweeps) + 1) / len(sweeps) <= allowed):
        sweeps.append({point: run(point) for point in points})
        spent += sum(sweeps[-1].values())
    return {point: min(sweep[point] for sweep in sweeps) for point in points}


class Launches:
    """Runs launches from made-up states, of batch sizes that never grow."""

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self.engine, self.weights = engine, weights
        self.control = engine.decoder.controller.init(None)
        self.state, self.batch = engine.begin(engine.layout.blank_request()), engine.shapes.batch

    def warm_up(self, rows: int) -> float:
        """Moves to a batch size; returns the seconds of a launch of one plain round."""
        if rows != self.batch:
            slots = np.tile(np.arange(rows, dtype=np.int32), self.engine.shapes.shards)
            self.state, self.batch = self.engine.shrink(self.batch, self.state, slots), rows
        point = Point(rows, 0, cost_model.contexts(limits_of(self.engine))[0], 0, 0, 1)
        first = self.run(point)
        return first if first > 3 * LONG else min(first, self.run(point))  # the first is slower

    def run(self, point: Point) -> float:
        """Runs one launch; returns its seconds, in every process those of process 0."""
        engine = self.engine
        state = _stage(engine, self.state, point)
        began = time.perf_counter()
        self.state, _, _ = engine.launch(
            self.weights, point.rows, state, self.control, rounds=point.rounds, smaller=0,
            waiting=np.zeros(engine.shapes.shards, np.int32),
            force=np.asarray([point.steps, point.bucket], np.int32))
        jax.block_until_ready(self.state)
        return float(agreed(np.float64(time.perf_counter() - began)))


def _stage(engine: Engine, state: RolloutState, point: Point) -> RolloutState:
    """Returns a state with every row at the point's context, nothing generated and no end to come.

    The drafter reads what each measured round commits, as part of the cost of drafting.
    """
    s, layout = engine.shapes, engine.layout
    host = layout.host_state(layout.blank_request(), point.rows)
    slots = np.where(np.arange(point.rows) < s.sequences, np.arange(point.rows), s.sequences)
    host = host.replace(
        seq=np.tile(slots.astype(np.int32), s.shards),
        sampling=host.sampling.replace(stop=np.full_like(layout.stop, -1),
                                       limit=np.full_like(host.sampling.limit, ENDLESS)),
        cache=host.cache.replace(length=np.full(point.rows * s.shards, point.context, np.int32)))
    read = np.full(point.rows * s.shards, point.context - point.unread, np.int32)
    host = host.replace(cache=host.cache.replace(kv=state.cache.kv),
                        draft=engine.decoder.drafter.skip_to(state.draft, read))
    state = jax.tree.map(
        lambda place, a: a if isinstance(a, jax.Array) else sharding.put(place, a),
        layout.shardings(host), host)
    return jax.block_until_ready(state)
