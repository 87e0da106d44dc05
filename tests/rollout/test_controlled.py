"""Controllers in an engine: measured costs, equal tokens under any controller, launch records."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from control_cases import made_up, record
from helpers import (
    ask,
    counting,
    make_engine,
    make_task,
    roll_out,
    said,
    streams,
    tiny_arch,
    tiny_params,
)
from jax.experimental import multihost_utils
from studies.recorded import replay, replay_params

from specrl_jax import sharding
from specrl_jax.config import Config, ControlConfig, MeshConfig, RolloutConfig, SpecOptions
from specrl_jax.control import cost_model, registry
from specrl_jax.control.buckets import bucket_table
from specrl_jax.control.cost_model import CostTable
from specrl_jax.control.protocol import Limits
from specrl_jax.metrics import launches
from specrl_jax.rollout import profile
from specrl_jax.rollout.engine import Engine, Result
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.state import PublishedDrafter, PublishedPolicy, RolloutInputs

DEPTH, NODES, BATCH = 3, 4, 4
ARCH = tiny_arch(num_layers=1)
PARAMS = tiny_params(ARCH)
TASK = make_task()
SPEC = SpecOptions(max_depth=DEPTH, depth=2, max_branch=1, nodes=3, max_nodes=NODES)


def knobs(corruption: float, mesh: Any = None) -> Any:
    place = sharding.replicated(mesh or sharding.make_mesh(MeshConfig()))
    return jax.device_put(replay_params(corruption), place)


def limits_of(task: Any, batches: tuple[int, ...] = (4, 2), smallest: int = 0) -> Limits:
    return Limits(depth=DEPTH, branch=1, nodes=NODES, mix=(1.0,), longest=task.prompt
                  + task.response - 1, buckets={
                      b: bucket_table(b, NODES, 64, b == smallest) for b in batches})


class Controlled:
    """An engine, and what speculation has learned in its rollouts so far."""

    def __init__(self, engine: Engine, control: Any) -> None:
        self.engine, self.speculation = engine, engine.initial_speculation().replace(
            control=control)

    def start_again(self, control: Any) -> None:
        self.speculation = self.speculation.replace(control=control)


def controlled(policy: str, mesh: Any = None, task: Any = TASK, costs: CostTable | None = None,
               **options: Any) -> Controlled:
    """An engine of 4 slots a shard, compacted to 2, that drafts recorded streams."""
    controller = registry.make(ControlConfig(policy=policy), SPEC, limits_of(task))
    engine = make_engine(ARCH, task, drafter=replay(depth=DEPTH, nodes=NODES, vocab=24),
                         batch=BATCH * (1 if mesh is None else sharding.shard_count(mesh)),
                         min_batch=2, past=task.group, controller=controller, mesh=mesh, **options)
    engine.compile(engine.replicate(PARAMS), knobs(0, mesh))
    return Controlled(engine, controller.init(costs))


def run(controlled: Controlled, record: Result, corruption: float, rounds: int = 3,
        depth: int | None = None, **sampling: Any) -> Result:
    past = np.where(said(record), record.sequences.tokens, -1).astype(np.int32)
    asked = ask(TASK, past=past.reshape(-1, TASK.group, past.shape[1]), **sampling)
    engine = controlled.engine
    result, controlled.speculation = engine.run(
        engine.replicate(PARAMS), knobs(corruption, engine.mesh), controlled.speculation, asked,
        rounds=rounds, depth=depth)
    return result


@pytest.fixture(scope="module")
def plain() -> Result:
    engine = make_engine(ARCH, TASK, batch=5)
    engine.compile(PARAMS)
    return roll_out(engine, PARAMS, ask(TASK))


@pytest.fixture(scope="module")
def budget(plain: Result) -> Controlled:
    budget = controlled("budget", costs=made_up(limits=limits_of(TASK)))
    run(budget, plain, 0.0)
    return budget


# Measuring.


def spied(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[tuple[Any, ...]]:
    """(rows, steps, bucket, contexts, rounds asked, rounds run) of each launch."""
    ran: list[tuple[Any, ...]] = []

    def launch(weights: Any, batch: int, state: Any, control: Any, **asked: Any) -> Any:
        before, contexts = int(state.counters.rounds[0]), np.unique(state.cache.length)
        out = Engine.launch(engine, weights, batch, state, control, **asked)
        ran.append((batch, *map(int, asked["force"]), *map(int, contexts), asked["rounds"],
                    int(out[0].counters.rounds[0]) - before))
        return out

    monkeypatch.setattr(engine, "launch", launch)
    return ran


@pytest.mark.parametrize("long, rounds", [(np.inf, profile.ROUNDS), (-1, 1)])
def test_measured_launches_are_those_of_points(
        budget: Controlled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long: float,
        rounds: int) -> None:
    file, engine = tmp_path / "costs.json", budget.engine
    with monkeypatch.context() as patch:
        patch.setattr(profile, "LONG", long)
        patch.setattr(profile, "SECONDS", 0.0)
        ran = spied(patch, engine)
        costs = profile.measured(engine, PARAMS, knobs(0), str(file), {})
    limits = profile.limits_of(engine)
    wanted = [p for b in (4, 2) for p in cost_model.points(limits, b, rounds, False)]
    assert {r[:5] for r in ran} >= {(p.rows, p.steps, p.bucket, p.context, p.rounds)
                                    for p in wanted}
    warm_ups = 1 if long < 0 else 2  # of each batch size
    assert len(ran) == len(wanted) + 2 * warm_ups
    assert all(asked == done for *_, asked, done in ran)
    assert (costs.verify > 0).all()
    actual = profile.stored(engine, str(file), {})
    assert actual is not None
    jax.tree.map(np.testing.assert_array_equal, actual, costs)
    assert profile.stored(engine, str(file), {"drafter": "other"}) is None
    assert profile.stored(engine, str(file), {}, since=2e10) is None
    monkeypatch.setattr(engine, "decoder", dataclasses.replace(engine.decoder, invariant=True))
    assert profile.stored(engine, str(file), {}) is None


@pytest.mark.parametrize("known", [True, False])
def test_processes_share_the_costs_of_process_0(
        known: bool, budget: Controlled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By as many broadcasts: one more or less, and the processes would wait for each other."""
    file, sent = tmp_path / "costs.json", []
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    if known:
        profile.measured(budget.engine, PARAMS, knobs(0), str(file), {})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(profile.sharding, "put", lambda place, tree: jax.device_put(tree, place))
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all",
                        lambda mine: sent.append(mine) or mine)
    first = profile.stored(budget.engine, str(file), {})
    left = iter(sent)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda mine: next(left))
    other = profile.stored(budget.engine, str(tmp_path / "none.json"), {})
    assert not list(left) and (first is not None) == known
    jax.tree.map(np.testing.assert_array_equal, other, first)


@pytest.mark.parametrize("fresh, known, updates, calls", [
    (True, False, "online", "stored measured init"), (True, True, "online", "stored init"),
    (False, True, "online", "stored"), (False, False, "online", "stored measured init"),
    (False, False, "off", "stored")])
def test_costs_replace_a_fresh_controllers_and_keep_a_resumed_ones(
        fresh: bool, known: bool, updates: str, calls: str, monkeypatch: pytest.MonkeyPatch
        ) -> None:
    config = Config(control=ControlConfig(policy="budget", cost_updates=updates),
                    rollout=RolloutConfig(batch_size=16, min_batch=8, max_prompt_tokens=10,
                                          max_new_tokens=8))
    sampler = Sampler(config, ARCH, (3,), sharding.make_mesh(config.mesh), prompts=8, group=2)
    speculation = sampler.engine.initial_speculation().replace(fresh=fresh)
    called: list[str] = []

    def calling(name: str, result: Any) -> Any:
        return lambda *args: called.append(name) or result

    engine, table = sampler.engine, made_up(limits=limits_of(TASK))
    monkeypatch.setattr(engine, "decoder", dataclasses.replace(
        engine.decoder, controller=engine.decoder.controller._replace(init=calling("init", None))))
    monkeypatch.setattr(profile, "stored", calling("stored", table if known else None))
    monkeypatch.setattr(profile, "measured", calling("measured", table))
    monkeypatch.setattr("specrl_jax.rollout.sampler.plain_round_seconds", lambda *args: {})
    inputs = RolloutInputs(PublishedPolicy({}), PublishedDrafter((), ()), speculation)
    after = sampler.find_costs(inputs)
    assert " ".join(called) == calls and after.fresh is (fresh and "init" not in calls)
    called.clear()
    sampler.find_costs(inputs, measure=False)
    assert "measured" not in called


# Rollouts.


@pytest.mark.parametrize("corruption", [0.0, 0.5, 1.0])
def test_tokens_are_those_of_plain_decoding(budget: Controlled, plain: Result, corruption: float
                                            ) -> None:
    actual, before = [], budget.speculation
    assert counting(lambda: actual.append(run(budget, plain, corruption))) == 0
    assert streams(actual[0]) == streams(plain)
    assert jax.tree.map(np.shape, before) == jax.tree.map(np.shape, budget.speculation)
    assert not any(a.is_deleted() for a in jax.tree.leaves((before, budget.speculation))
                   if isinstance(a, jax.Array)), "a rollout that is cut short would lose it"


@pytest.mark.ci
@pytest.mark.parametrize("policy", ["fixed", "respec"])
def test_tokens_are_the_same_under_every_policy(policy: str, plain: Result) -> None:
    engine = controlled(policy)
    actual = [run(engine, plain, 0.0)]
    for corruption in (0.0, 0.5, 1.0):
        assert counting(lambda c=corruption: actual.append(run(engine, plain, c))) == 0
        assert streams(actual[-1]) == streams(plain)


@pytest.mark.ci
def test_shards_decide_alike(plain: Result) -> None:
    """Two shards whose rows end at different times; the state is one for both."""
    engine = controlled("budget", sharding.make_mesh(MeshConfig(data=2)))
    for corruption in (0.0, 0.5):
        result = run(engine, plain, corruption)
        assert streams(result) == streams(plain)
    assert sum(t.committed for t in result.trace) == result.counters["committed"]
    assert sum(t.rounds for t in result.trace) * 2 == result.counters["rounds"]


@pytest.mark.ci
def test_nothing_is_verified_beyond_a_limit(plain: Result) -> None:
    """Drafts at a row's end are never accepted, and would cost a larger bucket."""
    limit = np.minimum(TASK.response, 1 + np.arange(TASK.sequences) % 5)
    actual = run(controlled("fixed"), plain, 0.0, limit=limit)
    assert streams(actual) == [row[:n] for row, n in zip(streams(plain), limit, strict=True)]
    assert actual.counters["drafted"] == actual.counters["accepted"] > 0
    assert (actual.sequences.rounds[limit <= 3] == 1).all(), "and nothing is missing"


@pytest.mark.parametrize("depth", [None, 2])
def test_launch_records_add_up_to_the_counters(budget: Controlled, plain: Result, depth: int | None
                                               ) -> None:
    result = run(budget, plain, 0.3, depth=depth)
    for name in ("rounds", "row_rounds", "committed", "drafted", "packed", "slots", "draft_rounds",
                 "draft_depth"):
        assert sum(getattr(t, name) for t in result.trace) == result.counters[name], name
    assert [t.last for t in result.trace] == [False] * (len(result.trace) - 1) + [True]
    assert depth is None or (result.counters["drafted"] > 0
                             and all(t.draft_depth == 2 * t.draft_rounds for t in result.trace))
    summary = launches.summary(result.trace)
    assert len(summary[launches.LAUNCHES]) == len(result.trace) == len(launches.recorded(summary))
    assert summary["control/plain_seconds"] > 0 and summary["time/regret"] >= 0
    assert launches.saved(result.trace, {4: 1.0, 2: 1.0}) == {}, "the controller predicts it"


def test_saved_seconds_follow_from_plain_rounds() -> None:
    """8 rows of which all live commit 24 tokens in 2 rounds: plainly 3 rounds. Then 4 rows of which
    3 live commit 6 tokens in 1 round: plainly 2."""
    trace = [record(0.5, 4, committed=24, row_rounds=16, rounds=2),
             record(0.25, 2, committed=6, row_rounds=3, rounds=1)]
    assert launches.saved(trace, {4: 1.0, 2: 0.5}) == {
        "time/saved": pytest.approx(3 * 1.0 + 2 * 0.5 - 0.75)}
    assert launches.saved(trace, {}) == launches.saved([], {4: 1.0}) == {}
    assert launches.summary(trace) == {}


def dear(budget: Controlled, batches: tuple[int, ...]) -> Any:
    """A state that knows nothing: drafts are free, and their verification too, but at `batches`
    it costs ten times as much as plain decoding."""
    limits = limits_of(TASK)
    table = made_up(wide=0.0, step=1e-6, limits=limits)
    wide = np.arange(table.verify.shape[1])[:, None]
    factor = np.stack([1 + 9 * (rows in batches) * wide for rows in limits.buckets])
    verify = (table.verify * factor).astype(np.float32)
    return budget.engine.decoder.controller.init(table.replace(verify=verify))


def test_nothing_is_drafted_where_it_never_pays(budget: Controlled, plain: Result) -> None:
    budget.start_again(dear(budget, (4, 2)))
    result = run(budget, plain, 0.0)
    assert result.counters["drafted"] == 0 and streams(result) == streams(plain)
    assert result.counters["packed"] == result.counters["slots"]


def test_jumping_loads_stall_and_compile_nothing(budget: Controlled, plain: Result) -> None:
    """Four rows decode plainly and two draft, time and again."""
    limit = [1] * (TASK.sequences - 2) + [TASK.response] * 2
    jumps, compiled, rounds, drafted = 3, 0, [], set()
    budget.start_again(dear(budget, (4,)))
    for depth in (None, 0):
        actual: list[Result] = []
        for _ in range(jumps):
            compiled += counting(lambda into=actual, depth=depth: into.append(
                run(budget, plain, 0.0, rounds=1, depth=depth, limit=limit)))
        rounds.append([one.counters["rounds"] for one in actual])
        drafted |= {t.batch for one in actual for t in one.trace if t.draft_rounds}
        assert [streams(one) for one in actual] == [
            [row[:most] for row, most in zip(streams(plain), limit, strict=True)]] * jumps
    assert compiled == 0 and drafted == {2}
    assert all(drafts < off for drafts, off in zip(*rounds, strict=True))
