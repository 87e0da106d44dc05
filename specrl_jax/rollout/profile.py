"""Measuring what rounds cost, with the compiled launches that rollouts run, and its table.

Nothing is compiled for it, and nothing is learned from it.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import multihost_utils

from specrl_jax import sharding
from specrl_jax.control import cost_file, cost_model, prices
from specrl_jax.control.adaptive import Adaptive
from specrl_jax.control.cost_file import Record
from specrl_jax.control.cost_model import Ladders, Point, Run
from specrl_jax.io.machine import cores, processor
from specrl_jax.rollout.engine import Engine
from specrl_jax.rollout.layout import RolloutRequest
from specrl_jax.rollout.round import buckets_of
from specrl_jax.structs import RolloutState

SWEEPS = 3  # over the launches of a batch size: two would have no median
MOST = 9  # sweeps, while all so far took less than
ENOUGH = 4.0  # seconds
MUCH = 12.0  # seconds of a batch size, which sweeps after the first are not to pass
TESTED = 2  # sweeps of a batch size that is left out of the fit: less noise, no choice rests on it
ENDLESS = 2**30  # tokens that a row may say in a measured launch; none is kept beyond T
LONG = 0.1  # seconds of a launch of one plain round of the largest batch size, above which rounds
# are long: measured launches have one, and batch sizes between others are left out of the fit
APART = 2  # launches between two of the reference, twice as many where rounds are long


def ladders(engine: Engine) -> Ladders:
    """The buckets of every batch size."""
    return {rows: buckets_of(engine.decoder, rows) for rows in engine.shapes.batches}


def key(engine: Engine, about: Mapping[str, Any]) -> dict[str, Any]:
    """What a measurement holds for. `about` says what drafts."""
    device, decoder = jax.devices()[0], engine.decoder
    return {"device": f"{device.platform} {device.device_kind} {processor()}",
            "cores": cores(), "flags": os.environ.get("XLA_FLAGS", ""),
            "jax": jax.__version__, "jaxlib": jaxlib.__version__,
            "model": dataclasses.asdict(decoder.arch), "invariant": decoder.invariant,
            "attention": decoder.implementation, "mesh": dict(engine.mesh.shape),
            "dtype": str(np.dtype(engine.layout.dtype)),
            "shapes": dataclasses.asdict(engine.shapes), "rule": decoder.rule,
            "truncates": decoder.truncates,
            "buckets": [[rows, *b] for rows, of in ladders(engine).items() for b in of],
            "drafter": dict(about)}


def priced(engine: Engine, params: Any, drafter_params: Any, path: str, about: Mapping[str, Any],
           report: Callable[[str], None], since: float = 0.0) -> tuple[Adaptive, Record]:
    """The controller's state with tables of this device, read or measured and stored.

    Args:
      path: of the file; empty is one in the user's cache directory.
      about: what drafts.
      since: what was measured before, in seconds since 1970, is measured anew, as is what was
        measured for something else; the file is replaced.

    Raises:
      ConfigError: the file is none of costs.
    """
    wanted = key(engine, about)
    file = Path(path) if path else cost_file.default_path(wanted)
    record = cost_file.load(file, wanted, since) if jax.process_index() == 0 else None
    if not _agreed(float(record is not None)):
        report("measuring what rounds cost")
        record = measure(engine, params, drafter_params)
        if jax.process_index() == 0:
            cost_file.store(file, wanted, record)
    rows, far, depth = ladders(engine), engine.shapes.longest, engine.decoder.drafter.depth
    if jax.process_count() > 1:
        known = 0 if record is None else cost_model.rounds_of(record.measured)
        rounds = round(_agreed(float(known)))
        fit, held = cost_model.points(rows, far, depth, reads(engine), rounds)
        found = dict.fromkeys((*fit, *held), 0.0) if record is None else record.measured
        found = {p: _agreed(found[p]) for p in (*fit, *held)}
        record = Record(
            found, cost_model.error(cost_model.fit(found, rows, far, depth), found, held), 0.0, 0.0
        )
    report(f"cost of rounds: {100 * record.error:.1f} % mean error on held-out launches, measured "
           f"in {record.seconds:.1f} s, {file}")
    tables = cost_model.fit(record.measured, rows, far, depth)
    before = engine.control
    found = {size: prices.renewed(before.prices[size], before.tables[size], table)
             for size, table in tables.items()}
    return before.replace(factor=np.float32(1), prices={size: p for size, (p, _) in found.items()},
                          tables={size: table for size, (_, table) in found.items()}), record


def reads(engine: Engine) -> bool:
    """Whether the drafter has more to read when it was not asked for some rounds."""
    return engine.decoder.drafter.needs_catch_up


def _agreed(value: float) -> float:
    """Process 0's value, in every process."""
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float64(value)))


def measure(engine: Engine, params: Any, drafter_params: Any) -> Record:
    """Runs every launch that a fit needs, and those that it is tested on."""
    began, before = time.perf_counter(), engine.control
    rows, far, depth = ladders(engine), engine.shapes.longest, engine.decoder.drafter.depth
    state, measured, batch = _blank(engine), {}, engine.shapes.batch
    state, rounds = _rounds(engine, params, drafter_params, state)
    fit, held = cost_model.points(rows, far, depth, reads(engine), rounds)
    for size in engine.shapes.batches:
        if size != batch:
            state, batch = _smaller(engine, state, batch, size), size
            state, _ = _run(engine, params, drafter_params, state, *_shortest(engine, size))
        controls = {p: _forced(engine, p) for p in (*fit, *held) if p.rows == size}
        state, found = _timed(engine, params, drafter_params, state, controls,
                              MOST if any(p.rows == size for p in fit) else TESTED)
        measured |= found
    engine.control = before
    error = cost_model.error(cost_model.fit(measured, rows, far, depth), measured, held)
    return Record(measured, error, time.perf_counter() - began, time.time())


def _rounds(engine: Engine, params: Any, drafter_params: Any, state: RolloutState
            ) -> tuple[RolloutState, int]:
    """Rounds of the launches to measure: 1 where those of the largest batch size are long."""
    for _ in range(3):  # a program's first takes longer, as does one that others stall
        state, run = _run(engine, params, drafter_params, state,
                          *_shortest(engine, engine.shapes.batch))
        if run.seconds <= LONG:
            return state, cost_model.ROUNDS
    return state, 1


def _shortest(engine: Engine, size: int) -> tuple[Point, Adaptive]:
    """A launch of one plain round."""
    point = Point(size, 0, cost_model.contexts(engine.shapes.longest)[0], 0, 0, 1)
    return point, _forced(engine, point)


def plain(engine: Engine, params: Any, drafter_params: Any, rounds: int) -> dict[int, float]:
    """Seconds of a round without a draft at half the longest context, by batch size of a shard.

    For controllers that hold no table of costs. What a launch takes besides its rounds is part of
    them, so `rounds` is what a rollout's launches have. Nothing is chosen by it, so the fewest
    sweeps will do.
    """
    controller, state, batch = engine.decoder.controller, _blank(engine), engine.shapes.batch
    longest = engine.shapes.longest
    rounds = min(rounds, longest - longest // 2, engine.shapes.response)
    control = controller.depth(engine.control, 0)
    found = {}
    for size in engine.shapes.batches:
        if size != batch:
            state, batch = _smaller(engine, state, batch, size), size
        point = Point(size, 0, longest // 2, 0, 0, rounds)
        state, seconds = _timed(engine, params, drafter_params, state, {point: control}, SWEEPS)
        found[size] = seconds[point] / point.rounds
    return found


def _asked(engine: Engine) -> RolloutRequest:
    s = engine.shapes
    total = s.sequences * s.shards
    whole = {"temperature": np.ones(total, np.float32), "top_p": np.ones(total, np.float32),
             "top_k": np.zeros(total, np.int32), "limit": np.full(total, s.response, np.int32)}
    return RolloutRequest(prompts=[[0]] * (total // s.group),
                   keys=np.arange(2 * total, dtype=np.uint32).reshape(total, 2), **whole)


def _blank(engine: Engine) -> RolloutState:
    """A state of the largest batch, as a rollout begins."""
    return engine.begin(_asked(engine))


def _smaller(engine: Engine, state: RolloutState, batch: int, size: int) -> RolloutState:
    return engine.shrink(batch, state, np.tile(np.arange(size, dtype=np.int32),
                                               engine.shapes.shards))


def _forced(engine: Engine, point: Point) -> Adaptive:
    return engine.control.replace(force=np.asarray([point.steps, point.bucket], np.int32))


def _timed(engine: Engine, params: Any, drafter_params: Any, state: RolloutState,
           controls: Mapping[Point, Any], most: int = MOST
           ) -> tuple[RolloutState, dict[Point, float]]:
    """Seconds of launches, each under its control, in sweeps over all. The first of them is the
    reference, which is run between the others (`cost.steady`).

    Where more would pass MUCH there are fewer sweeps, at a price: launches of 64 rows of SmolLM2 on
    two cores had 4.4 % of error where they were held out, and 2.5 % with three sweeps, which took
    2.6 times as long.
    """
    reference, *others = controls
    apart = 2 * APART if reference.rounds == 1 else APART
    order = [reference, *(p for i in range(0, len(others), apart)
                          for p in (*others[i:i + apart], reference))]
    runs: list[Run] = []
    for sweep in range(most):
        spent = sum(run.seconds for run in runs)
        if (sweep >= SWEEPS and spent >= ENOUGH) or (
                sweep and spent * (sweep + 1) / sweep > MUCH):
            break
        for point in order:
            state, run = _run(engine, params, drafter_params, state, point, controls[point])
            runs.append(run)
    return state, cost_model.steady(runs, reference)


def _run(engine: Engine, params: Any, drafter_params: Any, state: RolloutState, point: Point,
         control: Any) -> tuple[RolloutState, Run]:
    """One launch. The seconds are process 0's, on which how many sweeps there are, and rounds of a
    launch, depend in every process."""
    state = _stage(engine, state, point)
    began = time.perf_counter()
    state, _, _ = engine.launch(
        point.rows, params, drafter_params, state, control, rounds=point.rounds, smaller=0,
        waiting=np.zeros(engine.shapes.shards, np.int32))
    jax.block_until_ready(state)
    seconds = _agreed(time.perf_counter() - began)
    return state, Run(point, began, seconds)


def _stage(engine: Engine, state: RolloutState, point: Point) -> RolloutState:
    """Every row at the point's context, with nothing said yet and no end to come, and the drafter
    where rounds leave it that draft: it reads what each of them commits, which is part of what
    drafting takes."""
    s, layout = engine.shapes, engine.layout
    host = layout.host_state(_asked(engine), point.rows)
    slots = np.where(np.arange(point.rows) < s.sequences, np.arange(point.rows), s.sequences)
    host = host.replace(
        seq=np.tile(slots.astype(np.int32), s.shards),
        sampling=host.sampling.replace(stop=np.full_like(layout.stop, -1),
                                       limit=np.full_like(host.sampling.limit, ENDLESS)),
        cache=host.cache.replace(length=np.full(point.rows * s.shards, point.context, np.int32)))
    read = np.full(point.rows * s.shards, point.context - point.missed, np.int32)
    host = host.replace(cache=host.cache.replace(kv=state.cache.kv),
                        draft=engine.decoder.drafter.skip_to(state.draft, read))
    state = jax.tree.map(
        lambda place, a: a if isinstance(a, jax.Array) else sharding.put(place, a),
        layout.shardings(host), host)
    return jax.block_until_ready(state)
