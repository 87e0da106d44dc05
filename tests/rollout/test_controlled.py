"""Adaptive controllers in an engine: measured costs, equal tokens, explained launches, audits."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle_slots
import jax
import numpy as np
import pytest
from helpers import ask, counting, make_engine, make_task, said, streams, tiny_arch, tiny_params
from specrl_jax.rollout.lockstep import plain_rounds

from specrl_jax import sharding
from specrl_jax.config import Config, ControlConfig, MeshConfig, RolloutConfig, SpecOptions
from specrl_jax.control import cost_model, registry
from specrl_jax.control.cost_model import bucket_ladder
from specrl_jax.draft.eagle import eagle
from specrl_jax.draft.merge import merge
from specrl_jax.draft.recorded import replay, replaying
from specrl_jax.io import launches
from specrl_jax.rollout import lengths, profile
from specrl_jax.rollout.engine import Engine, Result
from specrl_jax.rollout.sampler import Sampler

DEPTH, NODES, BATCH = 3, 4, 4
ARCH = tiny_arch(num_layers=1)
PARAMS = tiny_params(ARCH)
TASK = make_task()
SPEC = SpecOptions(max_steps=DEPTH, steps=2, max_branch=1, nodes=3, max_nodes=NODES)
OPTIONS: dict[str, dict[str, Any]] = {
    "budget": {}, "respec": {}, "bandit": {"epsilon": 0.5}, "oracle": {"accept": (1.5, 2.0, 2.5)}}


def knobs(corruption: float, mesh: Any = None) -> Any:
    place = sharding.replicated(mesh or sharding.make_mesh(MeshConfig()))
    return jax.device_put(replaying(corruption), place)


def controlled(policy: str, file: Path, mesh: Any = None, **options: Any) -> Engine:
    """An engine of 4 slots a shard, compacted to 2, that drafts recorded streams; priced."""
    control = ControlConfig(policy=policy, cost_table=str(file), **OPTIONS.get(policy, {}))
    controller = registry.make(
        control, SPEC, ladders={b: bucket_ladder(b, NODES, 64) for b in (4, 2)},
        longest=TASK.prompt + TASK.response - 1)
    engine = make_engine(ARCH, TASK, drafter=replay(depth=DEPTH, nodes=NODES, vocab=24),
                         batch=BATCH * (1 if mesh is None else sharding.shard_count(mesh)),
                         min_batch=2, past=TASK.group, controller=controller, mesh=mesh)
    for name, value in options.items():
        setattr(engine, name, value)
    params = engine.replicate(PARAMS)
    engine.compile(params, knobs(0, mesh))
    if controller.adaptive:
        engine.control, _ = profile.priced(
            engine, params, knobs(0, mesh), str(file), {}, lambda text: None)
    return engine


def _swept(monkeypatch: pytest.MonkeyPatch, seconds: list[float]
           ) -> tuple[list[int], list[float], list[float]]:
    """The rows of launches that were run, what they took, and what is left of `seconds`, of which
    each launch takes the next as process 0 tells it. Rows 4 are the reference."""
    runs: list[int] = []
    told = iter(seconds)
    engine = SimpleNamespace(shapes=SimpleNamespace(shards=1), launch=lambda rows, *_, **options: (
        runs.append(rows), None, None))
    monkeypatch.setattr(profile, "_stage", lambda engine, state, point: state)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(profile.multihost_utils, "broadcast_one_to_all", lambda mine: next(told))
    points = [
        cost_model.Point(
            rows=rows, bucket=0, context=8, steps=0, missed=0, rounds=cost_model.ROUNDS
        )
        for rows in (4, 3, 2, 1)
    ]
    found = profile._timed(engine, PARAMS, (), None, dict.fromkeys(points, ()))[1]
    return runs, list(found.values()), list(told)


def test_launches_are_swept_beside_a_reference_as_often_as_process_0_does(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches gather from all processes: one that ran another would wait for the others."""
    sweep = [0.05, 0.1, 0.15, 0.05, 0.25, 0.05]  # the reference, two, again, another, again
    busy = [3 * s for s in sweep]
    told = [*sweep, *busy, *sweep, *busy]  # 5.2 s: the fourth sweep passes ENOUGH, and is the last
    runs, found, left = _swept(monkeypatch, [*told, 9.0])
    assert runs == [4, 3, 2, 4, 1, 4] * 4 and left == [9.0]
    assert found == pytest.approx(  # at the median pace, between the two
        [0.05 * 3**0.5 * ratio for ratio in (1, 2, 3, 5)])


@pytest.mark.parametrize("one, sweeps", [(0.1, 7), (0.6, 3), (0.7, 2), (1.1, 1), (9.0, 1)])
def test_long_launches_are_swept_less_often(monkeypatch: pytest.MonkeyPatch, one: float,
                                            sweeps: int) -> None:
    """Else 64 rows of a 135M model on two cores are measured for two minutes."""
    runs, found, _ = _swept(monkeypatch, [one] * 60)
    assert runs == [4, 3, 2, 4, 1, 4] * sweeps
    assert found == pytest.approx([one] * 4)


@pytest.mark.slow
def test_a_launch_finds_the_drafter_one_position_behind_or_as_many_as_it_is_to_have_missed(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was launched before, the same launch too."""
    task = make_task(response=40)
    longest, ladders = task.prompt + 39, {b: bucket_ladder(b, NODES, 64) for b in (4, 2)}
    controller = registry.make(
        ControlConfig(policy="budget"), SPEC, ladders=ladders, longest=longest
    )
    drafter = eagle(eagle_slots.ARCH, depth=DEPTH, branch=1, nodes=NODES)
    engine = make_engine(eagle_slots.ACTOR, task, drafter=drafter, batch=BATCH, min_batch=2,
                         controller=controller)
    own = drafter.bind(eagle_slots.ACTOR_PARAMS, jax.device_put(eagle_slots.parameters()))
    engine.compile(eagle_slots.ACTOR_PARAMS, own)
    behind: dict[cost_model.Point, set[int]] = {}
    stage, run, timed = profile._stage, profile._run, []

    def staged(engine: Engine, state: Any, point: cost_model.Point) -> Any:
        state = stage(engine, state, point)
        for point in timed:
            missing = np.asarray(state.cache.length) - np.asarray(state.draft.length)
            behind.setdefault(point, set()).update(missing.tolist())
        return state

    def measured(*args: Any) -> Any:
        timed.append(args[4])
        result = run(*args)
        timed.clear()
        return result

    monkeypatch.setattr(profile, "SWEEPS", 2)
    monkeypatch.setattr(profile, "ENOUGH", 0)
    monkeypatch.setattr(profile, "_stage", staged)
    monkeypatch.setattr(profile, "_run", measured)
    profile.measure(engine, eagle_slots.ACTOR_PARAMS, own)
    drafting = {point: seen for point, seen in behind.items() if point.steps}
    assert len(drafting) > 8
    assert {p.missed for p in drafting} == {0, cost_model.contexts(longest)[1]}
    assert {p.context for p in drafting} > {cost_model.SHORTEST, longest}
    assert all(seen == {point.missed or 1} for point, seen in drafting.items())


@pytest.mark.parametrize("long, rounds", [(np.inf, {1, cost_model.ROUNDS}), (-1, {0, 1})])
def test_measured_launches_make_all_their_rounds_where_answers_are_one_token(
        monkeypatch: pytest.MonkeyPatch, long: float, rounds: set[int]) -> None:
    """Else a round would seem cheap that half of a launch never ran."""
    task = make_task(response=1)
    controller = registry.make(ControlConfig(policy="budget"), SPEC, ladders={
        b: bucket_ladder(b, NODES, 64) for b in (4, 2)}, longest=task.prompt)
    engine = make_engine(ARCH, task, drafter=replay(depth=DEPTH, nodes=NODES, vocab=24),
                         batch=BATCH, min_batch=2, past=task.group, controller=controller)
    engine.compile(PARAMS, knobs(0))
    made: list[tuple[int, int]] = []

    def spying(*args: Any, rounds: int, **asked: Any) -> Any:
        before = int(args[3].counters.rounds[0])
        out = Engine.launch(engine, *args, rounds=rounds, **asked)
        made.append((rounds, int(out[0].counters.rounds[0]) - before))
        return out

    monkeypatch.setattr(engine, "launch", spying)
    monkeypatch.setattr(profile, "SWEEPS", 1)
    monkeypatch.setattr(profile, "ENOUGH", 0)
    monkeypatch.setattr(profile, "LONG", long)
    profile.measure(engine, PARAMS, knobs(0))
    assert {asked for asked, _ in made} == rounds
    assert all(asked == ran for asked, ran in made)


@pytest.mark.parametrize("slow", [(), (2, 3), (4,), (4, 3, 2)])
def test_long_rounds_are_measured_one_a_launch(
        monkeypatch: pytest.MonkeyPatch, slow: tuple[int, ...]) -> None:
    """Those of the largest batch size tell. A program's first launch does not, nor does one that
    another process stalls. Of a size between others only what the fit is tested on is run."""
    runs: list[cost_model.Point] = []

    def takes(point: cost_model.Point) -> float:
        runs.append(point)
        spoilt = sum(p.rows == point.rows for p in runs) <= (2 if point.rows == 4 else 1)
        return 900.0 if spoilt else 1e-3 * point.rows + (
            profile.LONG if point.rows in slow else 0)

    monkeypatch.setattr(profile, "_run", lambda engine, params, own, state, point, control: (
        state, cost_model.Run(point, float(len(runs)), takes(point))))
    monkeypatch.setattr(profile, "_blank", lambda engine: None)
    monkeypatch.setattr(profile, "_smaller", lambda *args: None)
    monkeypatch.setattr(profile, "_forced", lambda engine, point: ())
    monkeypatch.setattr(profile, "reads", lambda engine: True)
    engine = SimpleNamespace(
        decoder=SimpleNamespace(drafter=SimpleNamespace(nodes=NODES, depth=DEPTH), most=8,
                                least=2),
        shapes=SimpleNamespace(batch=4, batches=(4, 3, 2), longest=64), control=None)
    record = profile.measure(engine, PARAMS, ())
    long = 4 in slow
    ladders, took = profile.ladders(engine), 1 if long else cost_model.ROUNDS
    fit, held = cost_model.points(ladders, 64, DEPTH, True, took)
    assert set(record.measured) == {*fit, *held} <= set(runs)
    assert cost_model.rounds_of(record.measured) == took and max(record.measured.values()) < 1
    for rows in (4, 2):
        reference = cost_model.Point(rows, 0, cost_model.contexts(64)[0], 0, 0, took)
        at = np.flatnonzero([p == reference for p in runs if p.rows == rows])
        assert np.diff(at).max() - 1 == (2 * profile.APART if long else profile.APART)
    tested = [p for p in held if p.rows == 3]
    assert any(p.rows == 3 for p in fit) is not long
    if long:
        between = [p for p in runs if p.rows == 3]
        assert between[0].context != tested[0].context and set(between[1:]) == set(tested)
        assert [between.count(p) for p in tested] == [2 * profile.TESTED, *(
            profile.TESTED for _ in tested[1:])], "the first is the reference"


@pytest.mark.parametrize("long", [np.inf, -1])
def test_a_process_without_the_file_has_the_tables_of_process_0(
        budget: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long: float) -> None:
    """By as many broadcasts: one more or less, and the processes would wait for each other."""
    engine, _ = budget
    own, file, told = knobs(0), tmp_path / "costs.json", []
    monkeypatch.setattr(profile, "LONG", long)
    profile.priced(engine, PARAMS, own, str(file), {}, lambda text: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(profile.multihost_utils, "broadcast_one_to_all",
                        lambda mine: told.append(mine) or mine)
    first, _ = profile.priced(engine, PARAMS, own, str(file), {}, lambda text: None)
    left = iter(told)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(profile.multihost_utils, "broadcast_one_to_all", lambda mine: next(left))
    other, _ = profile.priced(engine, PARAMS, own, str(tmp_path / "none.json"), {},
                            lambda text: None)
    assert not list(left)
    jax.tree.map(np.testing.assert_array_equal, other.tables, first.tables)


@pytest.mark.parametrize("asked, rounds", [(5, 5), (32, 8)])
def test_plain_rounds_are_timed_in_launches_as_long_as_a_rollouts(
        monkeypatch: pytest.MonkeyPatch, asked: int, rounds: int) -> None:
    points = []
    shapes = SimpleNamespace(longest=20, response=8, batch=4, batches=(4, 2), shards=1)
    controller = SimpleNamespace(depth=lambda control, depth: depth)
    engine = SimpleNamespace(shapes=shapes, control=None,
                             decoder=SimpleNamespace(controller=controller))
    monkeypatch.setattr(profile, "_blank", lambda engine: None)
    monkeypatch.setattr(profile, "_smaller", lambda engine, state, batch, size: state)
    monkeypatch.setattr(profile, "_run", lambda engine, params, drafter, state, point, control: (
        points.append((point, control)), cost_model.Run(point, 0.0, 1.0)))
    assert profile.plain(engine, PARAMS, (), asked) == {4: 1 / rounds, 2: 1 / rounds}
    assert [(p.rows, p.bucket, p.context, p.rounds, depth) for p, depth in points] == (
        3 * [(4, 0, 10, rounds, 0)] + 3 * [(2, 0, 10, rounds, 0)])


@pytest.fixture(scope="module")
def plain() -> Result:
    engine = make_engine(ARCH, TASK, batch=5)
    engine.compile(PARAMS)
    return engine.run(PARAMS, ask(TASK))


@pytest.fixture(scope="module")
def budget(tmp_path_factory: Any, plain: Result) -> tuple[Engine, Path]:
    file = tmp_path_factory.mktemp("cost") / "table.json"
    engine = controlled("budget", file, audit=2)
    engine.audit = 0
    run(engine, plain, 0.0)
    return engine, file


def run(engine: Engine, record: Result, corruption: float, rounds: int = 3, **sampling: Any
        ) -> Result:
    past = np.where(said(record), record.sequences.tokens, -1).astype(np.int32)
    asked = ask(TASK, past=past.reshape(-1, TASK.group, past.shape[1]), **sampling)
    return engine.run(engine.replicate(PARAMS), asked,
                      knobs(corruption, engine.mesh), rounds=rounds)


@pytest.mark.parametrize("drafter, reads", [
    (lambda: replay(depth=DEPTH, nodes=NODES, vocab=24), False),
    (lambda: eagle(eagle_slots.ARCH, depth=DEPTH, branch=1, nodes=NODES), True),
    (lambda: merge([replay(depth=DEPTH, nodes=NODES, vocab=24)] * 2, NODES), False),
    (lambda: merge([replay(depth=DEPTH, nodes=NODES, vocab=24),
                    eagle(eagle_slots.ARCH, depth=DEPTH, branch=1, nodes=NODES)], NODES), True)])
def test_a_drafter_that_reads_nothing_is_known(drafter: Any, reads: bool) -> None:
    engine = make_engine(eagle_slots.ACTOR, TASK, drafter=drafter(), batch=BATCH, past=TASK.group)
    assert profile.reads(engine) is reads


def test_nothing_is_verified_that_a_row_may_not_say(plain: Result, tmp_path: Path) -> None:
    """Else drafts at a row's end are promised and never accepted, and cost a larger bucket."""
    engine = controlled("fixed", tmp_path / "none.json")
    past = np.where(said(plain), plain.sequences.tokens, -1).astype(np.int32)
    asked = ask(TASK, past=past.reshape(-1, TASK.group, past.shape[1]))
    asked.limit = np.minimum(asked.limit, 1 + np.arange(TASK.sequences) % 5).astype(np.int32)
    found = engine.run(PARAMS, asked, knobs(0), rounds=3)
    assert streams(found) == [
        row[:limit] for row, limit in zip(streams(plain), asked.limit, strict=True)]
    assert found.counters["drafted"] == found.counters["accepted"] > 0
    assert (found.sequences.rounds[asked.limit <= 3] == 1).all(), "and nothing is missing"


def test_costs_are_measured_once(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, file = budget
    before, stored = jax.tree.map(np.asarray, engine.control), file.read_bytes()
    lines: list[str] = []
    again, record = profile.priced(engine, PARAMS, knobs(0), str(file), {}, lines.append)
    assert file.read_bytes() == stored and len(lines) == 1 and "held-out" in lines[0]
    assert 0 <= record.error < 10 and np.isfinite(record.error)
    for table in again.tables.values():
        assert (np.asarray(table.verify) > 0).all()
    with monkeypatch.context() as patch:
        key = profile.key(engine, {})
        patch.setattr(engine, "decoder", dataclasses.replace(engine.decoder, invariant=True))
        assert profile.key(engine, {}) != key
    assert abs(record.when - time.time()) < 3600
    lines.clear()
    monkeypatch.setattr(profile, "LONG", np.inf)
    ran: set[tuple[int, ...]] = set()

    def spying(batch: int, params: Any, own: Any, state: Any, control: Any, **asked: int) -> Any:
        rounds, contexts = int(state.counters.rounds[0]), np.unique(state.cache.length)
        out = Engine.launch(engine, batch, params, own, state, control, **asked)
        done = int(out[0].counters.rounds[0]) - rounds
        ran.add((batch, *map(int, control.force), *map(int, contexts), done))
        return out

    monkeypatch.setattr(engine, "launch", spying)
    profile.priced(engine, PARAMS, knobs(0), str(file), {"drafter": "other"}, lines.append)
    assert lines[0].startswith("measuring") and file.read_bytes() != stored
    file.write_bytes(stored)
    profile.priced(engine, PARAMS, knobs(0), str(file), {}, lines.append, record.when + 1)
    assert len(lines) == 4 and file.read_bytes() != stored, "stale"
    rows = profile.ladders(engine)
    wanted = [p for of in cost_model.points(rows, engine.shapes.longest, DEPTH, False) for p in of]
    assert not any(p.missed for p in record.measured), "a drafter that reads nothing"
    assert ran == {(p.rows, p.steps, p.bucket, p.context, p.rounds) for p in wanted}
    file.write_bytes(stored)
    engine.control = before


@pytest.mark.parametrize("clock,stale", [("measured", True), ("frozen", False)])
def test_old_costs_are_measured_anew_unless_the_run_is_there_to_be_repeated(
        clock: str, stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(control=ControlConfig(policy="budget", clock=clock), rollout=RolloutConfig(
        batch_size=4, max_prompt_tokens=10, max_new_tokens=8))
    sampler = Sampler(config, ARCH, (3,), sharding.make_mesh(config.mesh), prompts=2, group=2)
    asked: list[float] = []

    def priced(*args: Any) -> Any:
        asked.append(args[-1])
        return sampler.engine.control, None

    monkeypatch.setattr(sampler.engine, "compile", lambda *args, **how: None)
    monkeypatch.setattr(sampler, "canary", lambda *args: None)
    monkeypatch.setattr(profile, "priced", priced)
    sampler.compile()
    month = 30 * 24 * 3600
    assert asked[0] == (pytest.approx(time.time() - month, abs=60) if stale else 0.0)
    assert 0 < sampler.profiling < 60


@pytest.mark.parametrize("corruption", [0.0, 0.5, 1.0])
def test_tokens_are_those_of_plain_decoding_and_nothing_compiles(
        budget: Any, plain: Result, corruption: float) -> None:
    engine, _ = budget
    found, before = [], engine.control
    assert counting(lambda: found.append(run(engine, plain, corruption))) == 0
    assert streams(found[0]) == streams(plain)
    assert jax.tree.map(np.shape, before) == jax.tree.map(np.shape, engine.control)
    assert not any(a.is_deleted() for a in jax.tree.leaves((before, engine.control))
                   if isinstance(a, jax.Array)), "a rollout that is cut short would lose it"


def test_a_rollout_begins_with_its_longest_prompt_and_ends_with_what_it_would_have_taken(
        budget: Any, plain: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = budget
    begun, ended, controller = [], [], engine.decoder.controller

    def begin(state: Any, prompt: int) -> Any:
        begun.append(prompt)
        return controller.begin(state, prompt)

    def end(state: Any, trace: Any, stretches: Any) -> Any:
        ended.append((len(trace), stretches))
        return controller.end(state, trace, stretches)

    monkeypatch.setattr(engine, "decoder", dataclasses.replace(
        engine.decoder, controller=controller._replace(begin=begin, end=end)))
    result = run(engine, plain, 0.0)
    assert begun == [TASK.prompt] and len(result.trace) > 1
    assert said(result).sum() == said(plain).sum()
    prompt = np.repeat([len(p) for p in TASK.prompts], TASK.group)[None]
    assert ended == [(len(result.trace), plain_rounds(
        np.asarray(plain.sequences.length)[None], prompt, (4, 2)))]


@pytest.mark.parametrize("weighs", [True, False])
def test_what_is_expected_is_worked_out_as_often_as_it_is_used(
        budget: Any, plain: Result, monkeypatch: pytest.MonkeyPatch, weighs: bool) -> None:
    """Each launch weighs rows by it; else a plan asks once, in the first rounds of a batch size."""
    (engine, _), expected, of = budget, lengths.expected, []
    controller = engine.decoder.controller
    assert controller.weighs
    monkeypatch.setattr(lengths, "expected", lambda *args: of.append(0) or expected(*args))
    monkeypatch.setattr(engine, "decoder", dataclasses.replace(
        engine.decoder, controller=controller._replace(weighs=weighs)))
    limit = [2] * (len(TASK.prompts) * TASK.group - 1) + [TASK.response]
    batches = [launch["batch"] for launch in run(engine, plain, 1.0, limit=limit).trace]
    changes = sum(a != b for a, b in itertools.pairwise([0, *batches]))
    assert len(batches) > changes > 1
    assert len(of) == (len(batches) if weighs else changes)


@pytest.mark.parametrize("forced", [None, 2])
def test_every_launch_is_explained(budget: Any, plain: Result, forced: int | None) -> None:
    engine = budget[0]
    engine.control = engine.decoder.controller.depth(engine.control, forced)
    result = run(engine, plain, 0.3)
    engine.control = engine.decoder.controller.depth(engine.control, None)
    trace, counters = result.trace, result.counters
    assert sum(t["tokens"] for t in trace) == counters["committed"]
    assert sum(t["launch_rounds"] for t in trace) == counters["rounds"]
    assert sum(t["live"] * t["launch_rounds"] for t in trace) == counters["row_rounds"]
    assert sum(t["width"] * t["launch_rounds"] for t in trace) == counters["packed"]
    assert sum(t["nodes"] * t["live"] * t["launch_rounds"] for t in trace) == pytest.approx(
        counters["row_rounds"] + counters["drafted"])
    assert all(t["branch"] == (t["drafting"] > 0) for t in trace)  # replayed: chains
    assert forced is None or counters["drafted"] > 0
    summary = launches.summary(trace)
    assert len(summary[launches.LAUNCHES]) == len(trace) == len(launches.recorded(summary))
    assert summary["control/off_seconds"] > 0
    assert all(0 < t["predicted_tokens"] <= t["launch_rounds"] * BATCH * NODES for t in trace)


def test_seconds_saved_without_a_table_of_costs() -> None:
    """Two shards. 8 rows of which all live commit 24 tokens in 2 rounds: plainly 3 rounds. Then 4
    rows of which 3 live commit 6 tokens in 1 round: plainly 2."""
    trace = [dict(batch=4, seconds=0.5, committed=24, row_rounds=16, rounds=4),
             dict(batch=2, seconds=0.25, committed=30, row_rounds=19, rounds=6)]
    found = launches.saved(trace, {4: 1.0, 2: 0.5}, shards=2)
    assert found == {"time/saved": pytest.approx(3 * 1.0 + 2 * 0.5 - 0.75)}
    assert launches.saved(trace, {}, 2) == launches.saved([], {4: 1.0}, 2) == {}


def test_an_audit_runs_what_was_not_chosen_and_changes_nothing(
        budget: Any, plain: Result) -> None:
    engine, _ = budget
    try:
        engine.audit = 2
        found: list[Result] = []
        assert counting(lambda: found.append(run(engine, plain, 0.0))) == 0
    finally:
        engine.audit = 0
    assert streams(found[0]) == streams(plain)
    trace = found[0].trace
    assert all(t["launch_rounds"] == 1 for t in trace)
    assert [("audit_off_seconds" in t) for t in trace] == [i % 2 == 0 for i in range(len(trace))]
    for launch in trace[::2]:
        assert launch["audit_off_tokens"] == launch["live"]
        assert launch["audit_fixed_tokens"] >= launch["live"]
        assert launch["audit_off_seconds"] > 0 and launch["audit_fixed_seconds"] > 0


def dear(engine: Engine, batches: Sequence[str]) -> Any:
    """A state that knows nothing, with tables in which drafts cost nothing, and verifying more
    tokens than plain decoding nothing either, but ten times as much at these batch sizes."""
    tables = {rows: table.replace(
        verify=np.asarray(table.verify)[:1] * (1 + 9 * (rows in batches) * np.arange(
            len(table.packed), dtype=np.float32)[:, None]),
        draft=np.float32(1e-6) + 0 * np.asarray(table.draft))
        for rows, table in engine.control.tables.items()}
    return engine.decoder.controller.init().replace(tables=tables)


def test_a_slow_device_is_not_drafted_for(budget: Any, plain: Result) -> None:
    engine, _ = budget
    before = engine.control
    engine.control = dear(engine, ("4", "2"))
    result = run(engine, plain, 0.0)
    engine.control = before
    assert result.counters["drafted"] == 0 and streams(result) == streams(plain)
    assert result.counters["packed"] == result.counters["slots"]


@pytest.mark.parametrize("policy", ["budget", pytest.param("oracle", marks=pytest.mark.slow)])
def test_drafts_in_places_of_empty_slots_are_measured_chosen_and_accepted(
        plain: Result, policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two of eight rows run on, behind slots of rows that ended."""
    ladder = bucket_ladder(8, NODES, 64, True)
    controller = registry.make(ControlConfig(policy=policy, **OPTIONS[policy]), SPEC,
                             ladders={8: ladder}, longest=TASK.prompt + TASK.response - 1)
    engine = make_engine(ARCH, TASK, drafter=replay(depth=DEPTH, nodes=NODES, vocab=24), batch=8,
                         past=TASK.group, controller=controller, least=8)
    engine.compile(PARAMS, knobs(0))
    forced: set[tuple[int, ...]] = set()

    def spying(batch: int, params: Any, own: Any, state: Any, control: Any, **asked: int) -> Any:
        forced.add(tuple(map(int, control.force)))
        return Engine.launch(engine, batch, params, own, state, control, **asked)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "launch", spying)
        _, record = profile.priced(engine, PARAMS, knobs(0), str(tmp_path / "costs.json"), {},
                                 lambda text: None)
    buckets = range(len(ladder))
    assert {(p.steps, p.bucket) for p in record.measured} == forced >= {(1, b) for b in buckets}
    start, times = controller.init(), np.asarray([1.0, 1, *[10.0] * (len(ladder) - 2)], np.float32)
    table = start.tables["8"]
    assert table.packed[:3].tolist() == [8, 8, 16]
    table = table.replace(verify=0 * table.verify + times[:, None],
                          draft=table.draft + np.float32(0.01))
    engine.control = start.replace(tables={"8": table})
    limit = np.asarray([1] * 4 + [TASK.response] * 2 + [0] * (TASK.sequences - 6))
    for _ in range(2):
        found = run(engine, plain, 0.0, limit=limit)
        assert streams(found)[:6] == [
            row[:most] for row, most in zip(streams(plain)[:6], limit, strict=False)]
    counters = found.counters
    assert counters["accepted"] > counters["rounds"] and counters["packed"] == counters["slots"]


def test_a_samplers_rounds_have_the_buckets_that_its_tables_price() -> None:
    config = Config(control=ControlConfig(policy="budget"), rollout=RolloutConfig(
        batch_size=16, min_batch=8, max_prompt_tokens=10, max_new_tokens=8))
    engine = Sampler(config, ARCH, (3,), sharding.make_mesh(config.mesh), prompts=8, group=2).engine
    found = profile.ladders(engine)
    assert found[8][:2] == ((8, 1), (8, 8)) and found[16][:2] == ((16, 1), (32, 9))
    assert {int(rows): [*map(tuple, zip(table.packed, table.nodes, strict=True))]
            for rows, table in engine.control.tables.items()} == {
                rows: [*map(tuple, of)] for rows, of in found.items()}


def test_loads_that_jump_across_a_threshold_and_back_stall_and_compile_nothing(
        budget: Any, plain: Result) -> None:
    """Four rows decode plainly and two draft, time and again."""
    engine, _ = budget
    before, jumps, compiled, rounds, drafted = engine.control, 3, 0, [], set()
    limit = [1] * (TASK.sequences - 2) + [TASK.response] * 2
    engine.control = dear(engine, ("4",))
    for depth in (None, 0):
        engine.control = engine.decoder.controller.depth(engine.control, depth)
        found: list[Result] = []
        for _ in range(jumps):
            compiled += counting(lambda into=found: into.append(
                run(engine, plain, 0.0, rounds=1, limit=limit)))
        rounds.append([one.counters["rounds"] for one in found])
        drafted |= {t["batch"] for one in found for t in one.trace if t["steps"]}
        assert [streams(one) for one in found] == [
            [row[:most] for row, most in zip(streams(plain), limit, strict=True)]] * jumps
    engine.control = before
    assert compiled == 0 and drafted == {2}
    assert all(drafts < off for drafts, off in zip(*rounds, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fixed", "respec", "bandit", "oracle"])
def test_tokens_are_the_same_under_every_policy(
        policy: str, plain: Result, tmp_path: Path) -> None:
    engine = controlled(policy, tmp_path / "table.json")
    found = [run(engine, plain, 0.0)]
    for corruption in (0.0, 0.5, 1.0):
        assert counting(lambda c=corruption: found.append(run(engine, plain, c))) == 0
        assert streams(found[-1]) == streams(plain)


@pytest.mark.slow
def test_shards_decide_alike(plain: Result, tmp_path: Path) -> None:
    """Two shards whose rows end at different times; the state is one for both."""
    engine = controlled("budget", tmp_path / "table.json",
                        sharding.make_mesh(MeshConfig(data=2)))
    for corruption in (0.0, 0.5):
        result = run(engine, plain, corruption)
        assert streams(result) == streams(plain)
    assert sum(t["tokens"] for t in result.trace) == result.counters["committed"]
    assert sum(t["live"] * t["launch_rounds"] for t in result.trace) == (
        result.counters["row_rounds"])
