"""The host's side of a rollout: compiled programs, slots, refill, smaller batches, progress.

A rollout is launches until every sequence is done. Between launches the host sees which sequences
are done, on replicated arrays, so that every process decides alike.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.control import acceptance
from specrl_jax.control.acceptance import Acceptance
from specrl_jax.rollout import host_view, refill
from specrl_jax.rollout.decode_loop import launch
from specrl_jax.rollout.host_view import Forecast, HostView, Reliability
from specrl_jax.rollout.layout import ROW, Layout, RolloutRequest, Shapes, pad
from specrl_jax.rollout.plan import NOT_FORCED, Decoder, Weights
from specrl_jax.rollout.slots import EMPTY
from specrl_jax.rollout.state import Speculation
from specrl_jax.runtime.compilation import Compiler, Name, Program, abstract
from specrl_jax.runtime.step_timer import StepTimer
from specrl_jax.sharding import ROWS
from specrl_jax.structs import (
    Array,
    ControlState,
    DrafterParams,
    KVCache,
    LaunchRecord,
    Params,
    PyTree,
    Records,
    RolloutState,
    Sequences,
    SlotFill,
    carrier,
)

MEMORY = 0.9  # weight that outcomes keep from rollout to rollout
CPU_OPTIONS = {"xla_cpu_prefer_vector_width": "512"}  # XLA's 256 makes one row's products slower
UNFORCED = np.asarray([NOT_FORCED, NOT_FORCED], np.int32)


@dataclasses.dataclass
class Result:
    """What a rollout generated, as host arrays in canonical order, and what it cost."""

    sequences: Sequences
    counters: dict[str, int]
    seconds: float
    prefill_seconds: float
    trace: list[LaunchRecord]
    by_drafter: dict[str, dict[str, int]]  # nodes drafted and accepted
    rule: str  # of verification
    calibration: Reliability  # of the estimates that drafts were chosen by
    records: Records | None = None

    @property
    def accept_length(self) -> float:
        """Tokens that a row gained in each round, 1 without speculation."""
        return self.counters["committed"] / max(self.counters["row_rounds"], 1)


class Engine:
    """Compiled programs for one set of shapes; `run` is the rollout. It holds no other state.

    Args:
      decoder: model, drafter and controller.
      mesh: rows are split over its data axes.
      shapes: of one data shard.
      stop: stop token ids.
      dtype: of the cache.
      past: K, earlier responses of a prompt that a drafter may read.
      platform: whose layout the cache has; None is that of `mesh`.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh, shapes: Shapes, stop: Sequence[int],
                 dtype: jax.typing.DTypeLike = jnp.float32, past: int = 0,
                 platform: str | None = None) -> None:
        self.decoder, self.mesh, self.shapes = decoder, mesh, shapes
        self.layout = Layout(decoder, mesh, shapes, stop, dtype, past,
                             platform or sharding.platform(mesh))
        self._programs: dict[Any, Any] = {}

    def initial_speculation(self) -> Speculation:
        """Returns the state before anything was measured or accepted."""
        drafter = self.decoder.drafter
        return Speculation(control=self.decoder.controller.init(None),
                           acceptance=acceptance.blank(len(drafter.names), drafter.depth))

    # Programs.

    @property
    def compiled(self) -> bool:
        """Whether `compile` has been called."""
        return bool(self._programs)

    def compile(self, params: Params, drafter_params: DrafterParams = (),
                report: Callable[[str], None] = lambda text: None,
                others: Callable[[Compiler], None] = lambda compiler: None) -> None:
        """Compiles every program that `run` may call, so nothing compiles after this.

        Args:
          others: adds programs that are compiled at the same time.
        """
        report(f"compiling rollouts of {', '.join(map(str, self.shapes.batches))} rows")
        with Compiler() as compiler:
            added = {p.name: compiler.add(p) for p in self.programs(params, drafter_params)}
            others(compiler)
        self._programs = {name: future.result() for name, future in added.items()}

    def programs(self, params: Params, drafter_params: DrafterParams) -> Iterator[Program]:
        """Yields every program that `run` may call; the arguments may be abstract."""
        shapes, whole, specs = self.shapes, P(), self.layout.specs
        full, replicated = self.layout.abstract(shapes.batch), sharding.replicated(self.mesh)
        control = self._like(jax.tree.map(np.asarray, self.decoder.controller.init(None)),
                             replicated)
        slots = np.zeros(shapes.batch * shapes.shards, np.int32)
        fill = self._like(carrier(SlotFill, seq=slots, source=slots, copy=slots, root=slots,
                                  length=slots))
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
        waiting = self._like(np.zeros(shapes.shards, np.int32))
        force = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=replicated)
        for batch in shapes.batches:
            state = self.layout.abstract(batch)
            yield self._program(
                ("launch", batch), self._launch,
                (whole, whole, specs, whole, ROW, whole, whole, whole), (specs, whole, whole), (2,),
                params, drafter_params, state, control, waiting, number, number, force)
        yield self._program(
            "copy_prompt", functools.partial(refill.copy_prompt, self.decoder, shapes.prompt),
            (specs, ROW), specs, (0,), full, fill)
        for prompts, width in shapes.prefills:
            tokens = self._like(np.zeros((prompts * shapes.shards, width), np.int32))
            length = self._like(np.zeros(prompts * shapes.shards, np.int32))
            yield self._program(
                ("prefill", prompts, width),
                functools.partial(refill.prefill, self.decoder, shapes.prompt),
                (whole, whole, specs, ROW, ROW, ROW), specs, (2,), params, drafter_params, full,
                fill, tokens, length)
        if shapes.feed:
            rows = shapes.batch * shapes.shards
            yield self._program(
                "feed", functools.partial(refill.feed, self.decoder, shapes.fed),
                (whole, whole, specs, ROW, ROW, ROW), specs, (2,), params, drafter_params, full,
                self._like(np.zeros((rows, shapes.feed), np.int32)), fill.seq, fill.seq)
        for old, new in zip(shapes.batches, shapes.batches[1:], strict=False):
            slots = self._like(np.zeros(new * shapes.shards, np.int32))
            yield self._program(
                ("select_rows", old), functools.partial(refill.select_rows, self.decoder),
                (specs, ROW), specs, (), self.layout.abstract(old), slots)
        kv = self.layout.abstract_kv(shapes.batch)
        blank = jax.jit(lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), kv),
                        out_shardings=jax.tree.map(lambda a: a.sharding, kv))
        yield Program("blank_cache", blank, ())
        gather = jax.jit(lambda *x: x, out_shardings=replicated)
        yield Program("collect", gather, (full.sequences, full.counters, full.records))

    def _program(self, name: Name, function: Callable[..., Any], in_specs: PyTree,
                 out_specs: PyTree, donate: tuple[int, ...], *args: PyTree) -> Program:
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs,
                               axis_names=set(ROWS), check_vma=False)
        out = self.layout.of_results(jax.eval_shape(mapped, *args), out_specs)
        jitted = jax.jit(mapped, donate_argnums=donate, out_shardings=out)
        options = CPU_OPTIONS if sharding.platform(self.mesh) == "cpu" else None
        return Program(name, jitted, args, options)

    def _launch(self, params: Params, drafter_params: DrafterParams, state: RolloutState,
                control: ControlState, *args: Array
                ) -> tuple[RolloutState, ControlState, tuple[PyTree, ...]]:
        """Runs a launch; also returns what the host must see of it, gathered from all shards.

        The controller's state is passed and returned separately, because it outlives the rollout.
        """
        state = launch(self.decoder, params, drafter_params, state.replace(control=control), *args)
        seen = (state.sequences.done, state.sequences.length, state.counters, state.seen)
        return (state.replace(control=()), state.control,
                jax.lax.all_gather(seen, ROWS, tiled=True))

    # State.

    def _like(self, tree: PyTree, place: NamedSharding | None = None) -> PyTree:
        """Returns abstract arrays, split over rows where `place` is None."""
        return abstract(tree, sharding.rows(self.mesh) if place is None else place)

    def put_rows(self, tree: PyTree) -> PyTree:
        """Returns host arrays on the device, split over rows."""
        return sharding.put(sharding.rows(self.mesh), tree)

    def replicate(self, tree: PyTree) -> PyTree:
        """Returns host arrays on every device."""
        return sharding.put(sharding.replicated(self.mesh), tree)

    def begin(self, request: RolloutRequest) -> RolloutState:
        """Returns the state in which no slot is filled yet, without the controller's."""
        state = self.layout.host_state(request, self.shapes.batch)
        state = sharding.put(self.layout.shardings(state), state)
        return state.replace(cache=state.cache.replace(kv=self._blank_kv()))

    def _blank_kv(self) -> KVCache:
        return self._programs["blank_cache"]()

    # The rollout.

    def run(self, params: Params, drafter_params: DrafterParams, speculation: Speculation,
            request: RolloutRequest, *, rounds: int = 32, depth: int | None = None,
            progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
            peek: Callable[[np.ndarray, np.ndarray], bool] | None = None
            ) -> tuple[Result, Speculation]:
        """Generates all sequences of `request`; returns them and what speculation has learned.

        Args:
          params, drafter_params: published, with the shapes that `compile` was given.
          rounds: R, rounds of a launch.
          depth: of drafts, whatever the controller plans; None leaves it to the controller.
          progress: called after each launch with sequences done, their total, and tokens so far.
          peek: called after each launch with tokens i32[Q, T] and lengths i32[Q] so far, in the
            order of `request`; ends the rollout where it returns True. For one process.

        Raises:
          ConfigError: a prompt is longer than P or a limit than T.
        """
        self.layout.check(request)
        whole, rows = sharding.replicated(self.mesh), sharding.rows(self.mesh)
        weights = Weights(params, drafter_params)
        timer, view = StepTimer(), HostView(self.shapes, request, self.layout.cells)
        state, forecast = self.begin(request), Forecast(request, self.shapes.group)
        control, known = speculation.control, speculation.acceptance
        force = UNFORCED if depth is None else np.asarray([depth, NOT_FORCED], np.int32)
        trace: list[LaunchRecord] = []
        while not view.done.all():
            with timer("prefill"):
                state = (self._refill(weights, state, request, view)
                         if view.waiting.any() else self._compact(state, view))
                jax.block_until_ready(state.root)
            changes = forecast.changes(view, known)
            state = state.replace(**sharding.arguments(
                {name: whole if name == "estimate" else rows for name in changes}, changes))
            with timer("launch"):
                state, control, seen = self.launch(
                    weights, view.batch, state, control, rounds=rounds, waiting=view.waiting,
                    force=force,
                    smaller=0 if view.waiting.any() else self.shapes.smaller(view.batch))
                seen = jax.tree.map(np.asarray, seen)
            seconds = float(agreed(np.float64(timer.last)))
            trace.append(view.end_launch(seen, self.shapes.shards, seconds))
            control, trace[-1].control = self.decoder.controller.end_chunk(
                jax.tree.map(np.asarray, control), trace[-1])
            progress(int(view.done.sum()), view.done.size, int(view.length.sum()))
            if peek is not None and peek(np.asarray(state.sequences.tokens), view.length):
                break
        return self._result(state, view, trace, timer, known), speculation.replace(
            control=control, acceptance=acceptance.merge(known, view.outcomes, MEMORY))

    def launch(self, weights: Weights, batch: int, state: RolloutState, control: ControlState, *,
               waiting: np.ndarray, rounds: int, smaller: int, force: np.ndarray = UNFORCED
               ) -> tuple[RolloutState, ControlState, PyTree]:
        """Runs a compiled launch, which uses up `state`.

        Returns:
          The new state, the controller's, and what the host sees: done, lengths, counters and
          outcomes of drafts.
        """
        whole = sharding.replicated(self.mesh)
        args = sharding.arguments(
            (whole, sharding.rows(self.mesh), whole, whole, whole),
            (jax.tree.map(np.asarray, control), waiting, np.int32(rounds), np.int32(smaller),
             force))
        return self._programs["launch", batch](*weights, state, *args)

    def shrink(self, batch: int, state: RolloutState, slots: np.ndarray) -> RolloutState:
        """Returns the state of the next smaller batch, with `slots` i32[shards * rows]."""
        return self._programs["select_rows", batch](state, self.put_rows(slots))

    def _result(self, state: RolloutState, view: HostView, trace: list[LaunchRecord],
                timer: StepTimer, known: Acceptance) -> Result:
        """Collects what was generated and what it cost."""
        sequences, counters, records = jax.tree.map(np.asarray, self._programs["collect"](
            state.sequences, state.counters, state.records))
        judged = host_view.judge(view.outcomes, acceptance.table(
            known, jax.tree.map(np.zeros_like, view.outcomes)))
        by_drafter = {name: {kind: int(getattr(counters, kind)[:, i].sum())
                             for kind in ("drafted", "accepted")}
                      for i, name in enumerate(self.decoder.drafter.names)}
        return Result(sequences=sequences, counters=host_view.total_counts(counters), trace=trace,
                      by_drafter=by_drafter, calibration=judged, rule=self.decoder.rule,
                      seconds=timer.total, prefill_seconds=timer["prefill"], records=records)

    def _refill(self, weights: Weights, state: RolloutState, request: RolloutRequest,
                view: HostView) -> RolloutState:
        """Seats waiting sequences until no slot is free or none waits.

        Prompts run in the largest compiled batches that need no padding, because padding costs as
        much as prompts do; of several shards, those with fewer new prompts are padded.
        """
        s = self.shapes
        per_shard, shards = s.sequences // s.group, list(zip(view.slots, view.done, strict=True))
        while any(slots.has_free(done) and slots.waiting for slots, done in shards):
            new = max(slots.new_prompts(done) for slots, done in shards)
            at_once = max(p for p, _ in s.prefills if p <= max(new, 1))
            plans = [slots.refill(done, at_once) for slots, done in shards]
            tokens = [[request.prompts[i * per_shard + p] for p in plan.prompts]
                      for i, plan in enumerate(plans)]
            ends = [[request.prompts[i * per_shard + q // s.group] if q != EMPTY else [0]
                     for q in plan.seq] for i, plan in enumerate(plans)]
            flat = [prompt for rows in ends for prompt in rows]
            fill = self.put_rows(carrier(
                SlotFill, seq=np.concatenate([p.seq for p in plans]),
                source=np.concatenate([p.source for p in plans]),
                copy=np.concatenate([p.copy for p in plans]),
                root=np.asarray([p[-1] for p in flat], np.int32),
                length=np.asarray([len(p) - 1 for p in flat], np.int32)))
            state = self._seat(weights, state, fill, tokens)
            state = self._feed(weights, state, request, [plan.seq for plan in plans])
        return state

    def _seat(self, weights: Weights, state: RolloutState, fill: SlotFill,
              tokens: list[list[Sequence[int]]]) -> RolloutState:
        """Prefills new prompts in the smallest shape that holds every shard's, or copies slots."""
        most = max(map(len, tokens))
        if most == 0:
            return self._programs["copy_prompt"](state, fill)
        longest = max(len(prompt) for shard in tokens for prompt in shard)
        count, width = next((p, w) for p, w in self.shapes.prefills if p >= most and w >= longest)
        padded = [prompt for shard in tokens for prompt in [*shard, *[[0]] * (count - len(shard))]]
        program = self._programs["prefill", count, width]
        return program(*weights, state, fill, *self.put_rows(pad(padded, width)))

    def _feed(self, weights: Weights, state: RolloutState, request: RolloutRequest,
              seated: Sequence[np.ndarray]) -> RolloutState:
        """Appends what the sequences that a refill has `seated` in each shard's slots have already.
        """
        s = self.shapes
        if request.begun is None:
            return state
        seq = np.stack([np.where(of_shard == EMPTY, EMPTY, i * s.sequences + of_shard)
                        for i, of_shard in enumerate(seated)])
        left = np.where(seq == EMPTY, 0, request.length[seq])
        fed = np.zeros_like(left)
        while left.any():
            wanted = np.minimum(left, s.feed)
            count = np.clip(s.fed - (wanted.cumsum(1) - wanted), 0, wanted)
            columns = np.minimum(fed[..., None] + np.arange(s.feed), s.response - 1)
            tokens = request.begun.tokens[seq[..., None], columns]
            state = self._programs["feed"](*weights, state, *self.put_rows(jax.tree.map(
                lambda a: a.reshape(-1, *a.shape[2:]).astype(np.int32), (tokens, count, fed))))
            left, fed = left - count, fed + count
        return state

    def _compact(self, state: RolloutState, view: HostView) -> RolloutState:
        """Moves to smaller batches while every shard's live rows fit."""
        shards = list(zip(view.slots, view.done, strict=True))
        live = max(one.live(d) for one, d in shards)
        while (smaller := self.shapes.smaller(view.batch)) >= live:
            taken = [one.compact(smaller, d) for one, d in shards]
            state = self.shrink(view.batch, state, np.concatenate(taken))
            view.batch = smaller
        return state


def agreed(tree: PyTree) -> PyTree:
    """Returns process 0's arrays in every process, because all of them must decide alike."""
    return tree if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)
