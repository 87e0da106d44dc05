"""The host's side of a rollout: compiled programs, slots, refill, smaller batches, progress.

A rollout is launches until every sequence is done. Between launches the host sees which sequences
are done, on replicated arrays, so that every process decides alike.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.control import acceptance
from specrl_jax.control.acceptance import Acceptance, Reliability
from specrl_jax.control.packed import WORD, Packing
from specrl_jax.rollout import audit as audits
from specrl_jax.rollout import counted, lengths, lockstep, refill
from specrl_jax.rollout.decode_loop import launch
from specrl_jax.rollout.layout import ROW, STATE, Layout, RolloutRequest, Shapes, pad
from specrl_jax.rollout.round import Decoder
from specrl_jax.rollout.slots import EMPTY, Slots
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array, RolloutState, Sequences, SlotFill

MEMORY = 0.9  # weight that outcomes keep from rollout to rollout
COMPILERS = 4  # programs compiled at once
Outlook = dict[str, np.ndarray]
CPU_OPTIONS = {"xla_cpu_prefer_vector_width": "512"}  # XLA's 256 makes one row's products slower


@dataclasses.dataclass
class Result:
    """What a rollout made, as host arrays in canonical order, and what it cost."""

    sequences: Sequences
    counters: dict[str, int]
    seconds: float
    prefill_seconds: float
    trace: list[dict[str, float]]  # of each launch: batch, seconds, counters so far, explanation
    by_drafter: dict[str, dict[str, int]]  # nodes drafted and accepted
    rule: str  # of verification
    calibration: Reliability  # of the estimates that drafts were chosen by


class Engine:
    """Compiled programs for one set of shapes; `run` is the rollout.

    Args:
      decoder: model, drafter and controller.
      mesh: rows are split over its data axes.
      shapes: of one data shard.
      stop: stop token ids.
      dtype: of the cache.
      past: K, earlier responses of a prompt that a drafter may read.
      audit: every so many launches, off and the best constant depth are really run for a round.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh, shapes: Shapes, stop: Sequence[int],
                 dtype: Any = jnp.float32, past: int = 0, audit: int = 0) -> None:
        self.decoder, self.mesh, self.shapes = decoder, mesh, shapes
        self.audit = audit if decoder.controller.adaptive else 0
        self.layout = Layout(decoder, mesh, shapes, stop, dtype, past)
        self.control = decoder.controller.init()  # on the host
        self._packing = Packing(self.control)
        drafter = decoder.drafter
        self.acceptance = acceptance.blank(len(drafter.names), drafter.depth)  # earlier rollouts
        self._programs: dict[Any, Any] = {}
        self._pool: Any = None  # the largest batch's cache, kept from rollout to rollout

    # Programs.

    def compile(self, params: Any, drafter_params: Any = (),
                report: Callable[[str], None] = lambda text: None) -> None:
        """Compiles every program that `run` may call, so that nothing compiles after this."""
        shapes, whole, self._pool = self.shapes, P(), None
        full, replicated = self.layout.abstract(shapes.batch), sharding.replicated(self.mesh)
        control = jax.ShapeDtypeStruct((self._packing.size,), WORD, sharding=replicated)
        fill = self._rows_like(SlotFill(*(np.zeros(shapes.batch * shapes.shards, np.int32),) * 5))
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
        waiting = self._rows_like(np.zeros(shapes.shards, np.int32))
        report(f"compiling rollouts of {', '.join(map(str, shapes.batches))} rows")
        for batch in shapes.batches:
            state = self.layout.abstract(batch)
            self._add(("launch", batch), self._launch,
                      (whole, whole, STATE, whole, ROW, whole, whole), (STATE, whole, whole), (2,),
                      params, drafter_params, state, control, waiting, number, number)
            if self.audit:
                self._add(("copy", batch), functools.partial(jax.tree.map, jnp.copy), (STATE,),
                          STATE, (), state)
        self._add("copy_prompt", functools.partial(refill.copy_prompt, self.decoder, shapes.prompt),
                  (STATE, ROW), STATE, (0,), full, fill)
        for prompts, width in shapes.prefills:
            tokens = self._rows_like(np.zeros((prompts * shapes.shards, width), np.int32))
            length = self._rows_like(np.zeros(prompts * shapes.shards, np.int32))
            self._add(("prefill", prompts, width),
                      functools.partial(refill.prefill, self.decoder, shapes.prompt),
                      (whole, whole, STATE, ROW, ROW, ROW), STATE, (2,),
                      params, drafter_params, full, fill, tokens, length)
        for old, new in zip(shapes.batches, shapes.batches[1:], strict=False):
            slots = self._rows_like(np.zeros(new * shapes.shards, np.int32))
            self._add(("select_rows", old), functools.partial(refill.select_rows, self.decoder),
                      (STATE, ROW), STATE, (), self.layout.abstract(old), slots)
        gather = jax.jit(lambda *x: x, out_shardings=replicated)
        self._programs["collect"] = gather.lower(full.sequences, full.counters)
        pool = concurrent.futures.ThreadPoolExecutor(COMPILERS)
        try:
            options = CPU_OPTIONS if jax.default_backend() == "cpu" else None
            compiled = pool.map(lambda lowered: lowered.compile(compiler_options=options),
                                self._programs.values())
            self._programs = dict(zip(self._programs, compiled, strict=True))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for no queued program
        self._pool = self._blank_kv()  # zeros are programs, too

    def _add(self, name: Any, function: Callable[..., Any], in_specs: Any, out_specs: Any,
             donate: tuple[int, ...], *args: Any) -> None:
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs,
                               axis_names=set(ROWS), check_vma=False)
        out = self.layout.of_results(jax.eval_shape(mapped, *args), out_specs)
        jitted = jax.jit(mapped, donate_argnums=donate, out_shardings=out)
        self._programs[name] = jitted.lower(*args)

    def _launch(self, params: Any, drafter_params: Any, state: RolloutState, control: Array,
                *args: Any) -> tuple[RolloutState, Array, tuple[Any, ...]]:
        """A launch and what the host must see of it, gathered from all shards.

        The controller's state comes and goes by itself, packed: it outlives rollouts.
        """
        state = state.replace(control=self._packing.unpack(control))
        state = launch(self.decoder, params, drafter_params, state, *args)
        seen = (state.sequences.done, state.sequences.length, state.counters, state.seen)
        return (state.replace(control=()), self._packing.pack(state.control, jnp),
                jax.lax.all_gather(seen, ROWS, tiled=True))

    # State.

    def _rows_like(self, tree: Any) -> Any:
        place = sharding.rows(self.mesh)
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree)

    def put_rows(self, tree: Any) -> Any:
        return sharding.put(sharding.rows(self.mesh), tree)

    def everywhere(self, tree: Any) -> Any:
        return sharding.put(sharding.replicated(self.mesh), tree)

    def begin(self, asked: RolloutRequest) -> RolloutState:
        """The state in which no slot is filled yet, without the controller's."""
        state = self.layout.host_state(asked, self.shapes.batch)
        kv, self._pool = self._pool, None
        kv = self._blank_kv() if kv is None else kv
        state = sharding.put(self.layout.shardings(state), state)
        return state.replace(cache=state.cache.replace(kv=kv))

    def _blank_kv(self) -> Any:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding),
                            self.layout.abstract_kv(self.shapes.batch))

    def hand_on(self, other: "Engine") -> None:
        """Gives the cache kept between rollouts to an engine of the same shapes, which drops its
        own: engines that take turns need but one."""
        other._pool, self._pool = self._pool, None

    # The rollout.

    def run(self, params: Any, asked: RolloutRequest, drafter_params: Any = (), *, rounds: int = 32,
            progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
            peek: Callable[[np.ndarray, np.ndarray], None] | None = None) -> Result:
        """Generates all sequences of `asked`.

        Args:
          params: published, as `compile` saw them.
          rounds: R, rounds of a launch.
          progress: called after each launch with sequences done, their total, and tokens so far.
          peek: called after each launch with tokens i32[Q, T] and lengths i32[Q] so far, in the
            order of `asked`; for one process.

        Raises:
          ConfigError: a prompt is longer than P or a limit than T.
        """
        self.layout.check(asked)
        s, began, prefill_seconds, trace = self.shapes, time.perf_counter(), 0.0, []
        state, controller = self.begin(asked), self.decoder.controller
        self.control = controller.begin(self.control, max(map(len, asked.prompts), default=0))
        done = asked.limit.reshape(s.shards, s.sequences) == 0
        slots = [Slots(s.batch, int((~of_shard).sum()), s.group) for of_shard in done]
        outcomes = Acceptance(*(np.zeros((s.shards, *self.layout.cells), np.float32),) * 2)
        batch, length = s.batch, np.zeros(done.size, np.int32)
        past = lengths.of_past(asked.past, done.size // s.group)
        outlook: Outlook = {}
        while not done.all():
            started = time.perf_counter()
            if any(one.waiting for one in slots):
                state = self._refill(state, params, drafter_params, asked, slots, done)
            else:
                state, batch = self._compact(state, slots, done, batch)
            jax.block_until_ready(state.root)
            prefill_seconds += time.perf_counter() - started
            waiting = [one.waiting for one in slots]
            smaller = self.shapes.smaller(batch) if not any(waiting) else 0
            same = outlook if trace and trace[-1]["batch"] == batch else {}
            before, outlook = outlook, self._outlook(same, asked.limit, past, length, done, batch,
                                                     any(waiting), outcomes)
            state = state.replace(**self._changed(before, outlook))
            go = functools.partial(self.launch, batch, params, drafter_params,
                                   waiting=np.asarray(waiting, np.int32), smaller=smaller)
            audited = {}
            if self.audit and len(trace) % self.audit == 0:
                audited = audits.compare(go, self._programs["copy", batch], state, self.control,
                                         trace[-1] if trace else None)
            launched = time.perf_counter()
            state, control, seen = go(state, self.control, rounds=1 if self.audit else rounds)
            finished, length, counters, outcomes = jax.tree.map(np.asarray, seen)
            done = finished.reshape(done.shape)
            trace.append({"batch": batch, "seconds": time.perf_counter() - launched,
                          **counted.totals(counters), **audited})
            self.control = self._packing.unpack(np.asarray(control))
            self._learn(trace[-1])
            progress(int(done.sum()), done.size, int(length.sum()))
            if peek is not None:
                peek(np.asarray(state.sequences.tokens), length)
        if controller.adaptive:
            plain = lockstep.of_rollout(s, asked, length)
            self.control = controller.end(self.control, trace, plain)
        return self._result(state, batch, outcomes, trace, began, prefill_seconds)

    def launch(self, batch: int, params: Any, drafter_params: Any, state: RolloutState,
               control: Any, *, waiting: np.ndarray, rounds: int, smaller: int
               ) -> tuple[RolloutState, Array, Any]:
        """Runs a compiled launch, which uses up `state`: the new one, the controller's, packed, and
        what the host sees."""
        whole = sharding.replicated(self.mesh)
        args = sharding.arguments(
            (whole, sharding.rows(self.mesh), whole, whole),
            (self._packing.pack(control), waiting, np.int32(rounds), np.int32(smaller)))
        return self._programs["launch", batch](params, drafter_params, state, *args)

    def shrink(self, batch: int, state: RolloutState, slots: np.ndarray) -> RolloutState:
        """The state of the next smaller batch, with `slots` i32[shards * rows] of each shard."""
        return self._programs["select_rows", batch](state, self.put_rows(slots))

    def _learn(self, launch: dict[str, Any]) -> None:
        """The controller's turn between launches; `launch` gets its explanation."""
        controller = self.decoder.controller
        if controller.adaptive:
            if jax.process_count() > 1:
                seconds = np.float32(launch["seconds"])
                launch["seconds"] = float(multihost_utils.broadcast_one_to_all(seconds))
            launch |= controller.explain(self.control, launch)
        self.control = controller.update(self.control, launch)

    def _outlook(self, same: Outlook, limit: np.ndarray, past: np.ndarray, length: np.ndarray,
                 done: np.ndarray, batch: int, waiting: bool, outcomes: Acceptance) -> Outlook:
        """What a state holds of the future: survival of drafts; for a controller that looks at time
        expected lengths and weights of all sequences, too. While some wait, tokens are alike."""
        controller, estimate = self.decoder.controller, acceptance.table(self.acceptance, outcomes)
        outlook = {"estimate": estimate}
        if not controller.adaptive:
            return outlook
        if same and not controller.weighs:  # a plan asks what is left but once a batch size
            return outlook | {name: same[name] for name in ("expected", "weight")}
        expected = lengths.expected(limit, length, done.reshape(-1), past, self.shapes.group)
        weight = np.ones_like(expected) if waiting else lengths.weights(
            functools.partial(controller.weigh, self.control, batch), expected - length, ~done)
        return outlook | {"expected": expected, "weight": weight}

    def _changed(self, before: Outlook, now: Outlook) -> dict[str, Array]:
        """Of the host arrays `now` those that differ from `before`: a launch hands on what it was
        given."""
        new = {name: a for name, a in now.items()
               if name not in before or not np.array_equal(a, before[name])}
        whole, rows = sharding.replicated(self.mesh), sharding.rows(self.mesh)
        return sharding.arguments({n: whole if n == "estimate" else rows for n in new}, new)

    def _result(self, state: RolloutState, batch: int, outcomes: Acceptance,
                trace: list[dict[str, Any]], began: float, prefill_seconds: float) -> Result:
        """Collects what was made, and keeps what later rollouts use."""
        sequences, counters = jax.tree.map(
            np.asarray, self._programs["collect"](state.sequences, state.counters))
        if batch == self.shapes.batch:
            self._pool = state.cache.kv
        judged = acceptance.calibration(outcomes, acceptance.table(
            self.acceptance, jax.tree.map(np.zeros_like, outcomes)))
        self.acceptance = acceptance.merge(self.acceptance, outcomes, MEMORY)
        return Result(sequences=sequences, counters=counted.totals(counters), trace=trace,
                      by_drafter=counted.by_drafter(counters, self.decoder.drafter.names),
                      calibration=judged, rule=self.decoder.rule,
                      seconds=time.perf_counter() - began, prefill_seconds=prefill_seconds)

    def _refill(self, state: RolloutState, params: Any, drafter_params: Any, asked: RolloutRequest,
                slots: list[Slots], done: np.ndarray) -> RolloutState:
        """Seats waiting sequences until no slot is free or none waits.

        Prompts are run in the largest numbers that are compiled and need no padding, which costs as
        much as prompts do; of several shards, those with fewer new prompts are padded.
        """
        s = self.shapes
        per_shard = s.sequences // s.group
        while any(one.has_free(d) and one.waiting for one, d in zip(slots, done, strict=True)):
            new = max(one.new_prompts(d) for one, d in zip(slots, done, strict=True))
            at_once = max(p for p, _ in s.prefills if p <= max(new, 1))
            plans = [one.refill(d, at_once) for one, d in zip(slots, done, strict=True)]
            tokens = [[asked.prompts[i * per_shard + p] for p in plan.prompts]
                      for i, plan in enumerate(plans)]
            ends = [[asked.prompts[i * per_shard + q // s.group] if q != EMPTY else [0]
                     for q in plan.seq] for i, plan in enumerate(plans)]
            flat = [prompt for rows in ends for prompt in rows]
            fill = self.put_rows(SlotFill(
                seq=np.concatenate([p.seq for p in plans]),
                source=np.concatenate([p.source for p in plans]),
                copy=np.concatenate([p.copy for p in plans]),
                root=np.asarray([p[-1] for p in flat], np.int32),
                length=np.asarray([len(p) - 1 for p in flat], np.int32)))
            state = self._seat(state, params, drafter_params, fill, tokens)
        return state

    def _seat(self, state: RolloutState, params: Any, drafter_params: Any, fill: SlotFill,
              tokens: list[list[Sequence[int]]]) -> RolloutState:
        """One prefill of what is new, in the smallest shape that holds every shard's, or a copy."""
        most = max(map(len, tokens))
        if most == 0:
            return self._programs["copy_prompt"](state, fill)
        longest = max(len(prompt) for shard in tokens for prompt in shard)
        count, width = next((p, w) for p, w in self.shapes.prefills if p >= most and w >= longest)
        padded = [prompt for shard in tokens for prompt in [*shard, *[[0]] * (count - len(shard))]]
        program = self._programs["prefill", count, width]
        return program(params, drafter_params, state, fill, *self.put_rows(pad(padded, width)))

    def _compact(self, state: RolloutState, slots: list[Slots], done: np.ndarray, batch: int
                 ) -> tuple[RolloutState, int]:
        """Moves to smaller batches while every shard's live rows fit."""
        live = max(one.live(d) for one, d in zip(slots, done, strict=True))
        while self.shapes.smaller(batch) >= live:
            smaller = self.shapes.smaller(batch)
            if batch == self.shapes.batch:
                self._pool = state.cache.kv
            taken = [one.compact(smaller, d) for one, d in zip(slots, done, strict=True)]
            state = self.shrink(batch, state, np.concatenate(taken))
            batch = smaller
        return state, batch
