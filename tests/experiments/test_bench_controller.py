"""The controller benchmark: its statistics, and one cell of a tiny model."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.bench import (
    controller,
    controller_cells,
    controller_models,
    controller_stats,
    timing,
)
from experiments.bench.controller_cells import Cell
from experiments.bench.controller_shape import Run, Shape
from specrl_jax.config import (
    Config,
    ConfigError,
    ControlConfig,
    ModelSource,
    RolloutConfig,
    SpecOptions,
)
from specrl_jax.control import registry
from specrl_jax.control.cost_model import Bucket
from specrl_jax.io import data, machine
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.model.tiny import TINY, byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source
from tests.experiments.conftest import ROOT, environment

CHOOSING = {"off": [2.0] * 4, "1x1x2": [1.9] * 4}
TIMES = {"off": [2.2] * 4, "1x1x2": [2.4] * 4, "budget": [2.0] * 4, "oracle": [1.9] * 4}


def test_the_best_fixed_setting_is_chosen_on_other_runs_than_it_is_timed_on() -> None:
    assert controller_stats.best_fixed(CHOOSING) == "1x1x2"  # off by the runs that time it
    found = controller_stats.describe(CHOOSING, TIMES, {})
    assert found["arms"]["budget"]["ratio"] == pytest.approx(1.2)
    assert found["arms"]["off"]["ratio"] == pytest.approx(2.4 / 2.2)
    assert found["arms"]["1x1x2"]["ratio"] == 1 and found["arms"]["1x1x2"]["pairs"] == 4


def test_what_is_near_the_fastest_is_run_again_before_one_is_chosen() -> None:
    """off is fastest in its first run alone; 4x1x5 is too slow to be looked at again."""
    takes = {"off": [1.0] + [2.0] * 9, "1x1x2": [1.05] * 10, "4x1x5": [1.2] * 10}
    ran = {name: iter(seconds) for name, seconds in takes.items()}
    arms: Any = {name: lambda load, name=name: SimpleNamespace(seconds=next(ran[name]), load=load)
                 for name in takes}
    runs: Any = controller._choose(arms, lambda turn: 10 * turn, 2)
    assert {name: len(of) for name, of in runs.items()} == {"off": 2, "1x1x2": 6, "4x1x5": 2}
    assert [run.load for run in runs["off"]] == [0, 10], "all arms have the load of a repeat"
    assert [run.load for run in runs["1x1x2"]] == [0, 10, 20, 30, 40, 50]
    takes["off"][1] = 1.0
    ran |= {name: iter(seconds) for name, seconds in takes.items()}
    chosen_by = controller.times(controller._choose(arms, lambda turn: 0, 2))
    assert len(chosen_by["off"]) == 4 and controller_stats.best_fixed(chosen_by) == "1x1x2"


def test_what_had_fewer_loads_is_not_the_best() -> None:
    """They may have been the easier ones."""
    choosing = {"off": [1.0, 3.0, 3.0, 3.0], "1x1x2": [1.05, 2.9, 2.9, 2.9], "2x1x3": [1.2, 1.3]}
    assert controller_stats.best_fixed(choosing) == "1x1x2"
    assert controller_stats.near(choosing) == ["off", "1x1x2"]
    takes = {name: [1.0] * 2 for name in ("off", "1x1x2", "budget")}
    hard_ones_later = {"off": [1.0] * 2 + [9.0] * 3, "1x1x2": [2.0] * 2}
    assert controller_stats.one_setting(
        [case(0.0, "heavy", takes, hard_ones_later)])["setting"] == "off"


def test_loads_that_choose_are_not_timed() -> None:
    for count in (2, 3, 4, 11):
        shape = object.__new__(Shape)
        shape.loads = [[]] * count
        choosing, timed = ({of(turn) for turn in range(100)} for of in (
            shape.choosing, shape.timed))
        assert not choosing & timed and choosing | timed <= set(range(count))
        assert len(choosing) == len(timed) == count // 2


def test_real_prompts_make_loads_of_whole_rollouts() -> None:
    bench = object.__new__(controller_models.Bench)
    most = controller_models.LOADS["smollm2"]
    prompts = [[i] * 5 for i in range(2 * most + 9)]
    bench.prompts, bench.config = lambda least: [[least, *prompt] for prompt in prompts], Config()
    assert len(bench._loads(2, 8)) == most and bench._loads(1, 2)[0] == [[0] * 4], "the last ones"
    prompts = prompts[:9]
    assert bench._loads(2, 8) == [[[4] + [i] * 5 for i in load] for load in ((0, 1), (2, 3), (4, 5),
                                                                             (6, 7))]
    with pytest.raises(ConfigError, match="data.examples = 0: 9 prompts are too few for two "
                                          "rollouts of 5 rows"):
        bench._loads(5, 8)


def test_long_prompts_have_other_questions_before_their_own() -> None:
    tokenizer = byte_tokenizer()
    examples = [{"question": f"{i}+1?"} for i in range(5)]

    def prompts(least: int, system: str = "Add.") -> list[str]:
        return [tokenizer.decode(tokens) for tokens in controller_models.long_prompts(
            tokenizer, examples, system, least)]

    alone = [tokenizer.chat(data.messages(example, "Add.")) for example in examples]
    assert prompts(2) == alone, "as a run has them"
    two = prompts(len(tokenizer.encode(alone[0])) + 1)
    assert two == [alone[i].replace("Add.", f"Add.\nProblems of other people:\n{i - 1}+1?")
                   for i in (1, 3)], "the fifth is too short alone"
    assert prompts(10_000) == []
    without = tokenizer.chat(data.messages(examples[1], "Problems of other people:\n0+1?"))
    assert prompts(30, "")[0] == without, "no empty line first"


def test_a_mean_of_few_pairs_and_many_has_the_freedom_of_the_few() -> None:
    arms = [{"log_mean": 0.0, "log_error": 0.1, "pairs": 3},
            {"log_mean": 0.2, "log_error": 0.001, "pairs": 100}]
    found = controller_stats._geometric_mean(arms)
    assert found["ratio"] == pytest.approx(math.exp(0.1))
    error = math.sqrt(0.1**2 + 0.001**2) / 2
    assert math.log(found["high"]) == pytest.approx(0.1 + 4.3027 * error, rel=1e-3)


def test_a_duel_adds_pairs_of_two_arms_alone() -> None:
    duel = {"1x1x2": [3.0] * 4, "budget": [1.5] * 4}
    found = controller_stats.describe(CHOOSING, TIMES, duel)
    assert found["best_fixed"] == "1x1x2" and found["duel"] == duel
    assert found["arms"]["budget"]["ratio"] == pytest.approx((1.2 * 2.0) ** 0.5)
    assert found["arms"]["1x1x2"]["ratio"] == 1
    assert [found["arms"][name]["pairs"] for name in ("budget", "1x1x2", "oracle")] == [8, 4, 4]


def test_each_occasion_is_one_value() -> None:
    """Pairs of an occasion agree with each other, and not with those of the next."""
    case: dict[str, Any] = controller_stats.describe(CHOOSING, TIMES, {})
    case["cell"] = {"lengths": "uniform", "corruption": 0.0}
    assert controller_stats.uncertain(case, 3, 0.0) and not controller_stats.uncertain(case, 1, 0.0)
    for seconds in (2.4, 3.0):
        case = controller_stats.fought(case, {
            "1x1x2": [2.4] * 9, "budget": [seconds] * 8 + [9.9]})  # a burst of others
    arm, logs = case["arms"]["budget"], [math.log(ratio) for ratio in (1.2, 1.0, 0.8)]
    mean, error = np.mean(logs), np.std(logs, ddof=1) / 3**0.5
    assert arm["ratio"] == pytest.approx(math.exp(mean)) and arm["occasions"] == 3
    assert arm["high"] == pytest.approx(math.exp(mean + 4.30265 * error), rel=1e-4)
    assert arm["pairs"] == 4 + 18 and arm["median_seconds"] == 2.0
    before = controller_stats.describe(CHOOSING, TIMES, {})["arms"]
    assert case["arms"]["oracle"] == before["oracle"]
    mean_of_one = controller_stats.summarize({"a": case})["budget"]
    assert mean_of_one["high"] == pytest.approx(arm["high"], rel=1e-6), "two degrees of freedom"
    assert not controller_stats.uncertain(case, 3, 1.0), "known"
    assert controller_stats.uncertain(case, 3, 0.1) and controller_stats.uncertain(case, 4, 1.0)
    for _ in range(controller_stats.MOST - 3):
        case = controller_stats.fought(case, {"1x1x2": [2.4], "budget": [2.4]})
    assert controller_stats.uncertain(case, 2, 0.0) and not controller_stats.uncertain(case, 1, 0.0)
    for _ in range(controller_stats.MOST):
        case = controller_stats.fought(case, {"1x1x2": [2.4], "budget": [2.4]})
    assert not controller_stats.uncertain(case, 2, 0.0), "there is an end"


def test_an_interval_is_students() -> None:
    times = {"off": [1.0] * 4, "budget": [1.0, 1.1] * 2}
    logs = [0.0, math.log(1 / 1.1)] * 2
    mean = sum(logs) / 4
    error = (sum((x - mean) ** 2 for x in logs) / 3) ** 0.5 / 2
    arm = controller_stats.describe({"off": [1.0]}, times, {})["arms"]["budget"]
    assert arm["low"] == pytest.approx(math.exp(mean - 3.182446 * error))
    assert controller_stats.half_width({"off": [1.0]}, times, {}) == pytest.approx(
        (arm["high"] - arm["low"]) / 2)


def test_one_setting_for_all_heavy_cells_is_judged_run_by_run() -> None:
    """Totals pair the runs of cells; the second cell has fewer, and chose off only by its luck."""
    one = {"off": [4.0] * 3, "1x1x2": [3.0] * 3, "budget": [1.0, 2.0, 1.0]}
    other = {"off": [3.0] * 2, "1x1x2": [3.0] * 2, "budget": [1.0, 2.0]}
    found = controller_stats.one_setting(
        [case(0.0, "heavy", one, {"off": [4.0], "1x1x2": [2.0]}),
         case(0.4, "heavy", other, {"off": [1.0], "1x1x2": [2.0]})])
    assert found["setting"] == "1x1x2" and found["cells"] == 2
    logs = [math.log(6 / 2), math.log(6 / 4)]
    assert found["budget"]["ratio"] == pytest.approx(math.exp(sum(logs) / 2))
    half = 12.7062 * (logs[0] - logs[1]) / 2
    assert found["budget"]["low"] == pytest.approx(math.exp(sum(logs) / 2 - half), rel=1e-4)


def test_seconds_over_the_oracles_are_of_all_cells_run_by_run() -> None:
    one = {"off": [4.0] * 2, "1x1x2": [3.0] * 2, "budget": [1.0, 2.0], "oracle": [1.0, 1.0]}
    other = {"off": [4.0] * 2, "1x1x2": [3.0] * 2, "budget": [2.0, 2.0], "oracle": [2.0, 1.0]}
    found = controller_stats.summarize({"a": case(0.0, "heavy", one), "b": case(
        1.0, "uniform", other)})["budget"]["seconds_over_oracle"]
    logs = [math.log(3 / 3), math.log(4 / 2)]
    assert found["ratio"] == pytest.approx(math.exp(sum(logs) / 2))
    half = 12.7062 * (logs[1] - logs[0]) / 2
    assert found["high"] == pytest.approx(math.exp(sum(logs) / 2 + half), rel=1e-4)


def test_the_oracle_is_taught_in_the_order_of_its_settings_and_batches() -> None:
    ladders = {4: (Bucket(4, 1), Bucket(8, 5)), 2: (Bucket(2, 1), Bucket(8, 5))}
    control = registry.make(
        ControlConfig(policy="oracle", accept=(1.0,) * 3, settings=("1x1x2", "2x1x3", "4x1x5")),
        SpecOptions(max_depth=4, max_branch=1, max_nodes=5), ladders=ladders).init()
    engine: Any = SimpleNamespace(control=control, shapes=SimpleNamespace(batches=(4, 2)))
    accepted = {"off": 1.0, "4x1x5": 4.0, "2x1x3": 3.0, "1x1x2": 2.0}
    paced = {name: {4: (tokens, 1.0), 2: (tokens, tokens)} for name, tokens in accepted.items()}
    controller._teach(engine, ["1x1x2", "2x1x3", "4x1x5"], accepted, paced)
    own = engine.control.own
    assert own.tokens.tolist() == [2.0, 3.0, 4.0]
    assert own.gain.tolist() == [[1.0, 1.0, 1.0], [2.0, 3.0, 4.0]]  # of two rows, then of four


def test_rows_have_weights_only_where_nobody_knows_when_they_end() -> None:
    config = Config(rollout=RolloutConfig(min_batch=8), control=ControlConfig(length_weight=0.25))
    limited, stopped = (controller_cells.shaped(config, 64, 40, 1, "eagle", "budget", stops)
                        for stops in (False, True))
    assert (limited.control.length_weight, limited.rollout.min_batch) == (0, 16)
    assert (stopped.control.length_weight, stopped.rollout.min_batch) == (0.25, 8)
    assert [cell.sizes for cell in controller_cells.SMOLLM2][-2:] == [
        (64, (64,), False), (64, (64,), True)]
    assert Cell(4, 64, 0.4, "heavy").sizes == Cell(4, 1024, 1.0, "uniform").sizes == (
        4, (64, 1024), False)
    assert Cell(4, 512, None, "heavy").sizes == (4, (512,), False)


def test_a_rollout_until_stop_tokens_is_what_the_picture_shows() -> None:
    told = {"time/launches": [{"seconds": 1.0}, {"seconds": 2.0}],
            "control/launches": [{"live": 8, "nodes": 1, "tokens": 8},
                                 {"live": 2, "nodes": 5, "tokens": 12}]}
    cases = {name: {"cell": Cell(rows, 64, None, lengths)._asdict(), "explained": {"budget": told}}
             for name, rows, lengths in (("a", 64, "heavy"), ("b", 32, "stop"))}
    axes = Figure().subplots()
    controller_stats.draw_trace(axes, cases)
    assert axes.get_title() == "budget, 32 rows, context 64"
    assert {drawn.get_label(): drawn.get_data().values.tolist() for drawn in axes.patches} == {
        "active rows": [8, 2], "chosen nodes": [8, 10], "tokens/s": [8, 6]}
    assert axes.patches[0].get_data().edges.tolist() == [0, 1, 3]


def test_the_time_left_follows_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    left = timing.TimeLeft(10.0)
    assert str(left) == "time left unknown"
    now[0] += 60
    left.finished(2.0)
    assert str(left) == "about 4m00s left"


def case(corruption: float | None, lengths: str, times: dict, choosing: dict = CHOOSING) -> dict:
    cell = Cell(4, 64, corruption, lengths)
    return controller_stats.describe(choosing, times, {}, 2.0) | {"cell": cell._asdict()}


def test_cells_are_summed_up(tmp_path: Path) -> None:
    better = {name: [1.0] * 4 if name != "budget" else [0.5] * 4 for name in TIMES}
    cases = {"a": case(0.0, "heavy", better), "b": case(1.0, "heavy", TIMES),
             "c": case(0.4, "uniform", TIMES)}
    found = controller_stats.summarize(cases)
    assert found["budget"]["ratio"] == pytest.approx((2 * 1.2 * 1.2) ** (1 / 3))
    assert found["budget"]["worst"] in ("b", "c") and found["budget"]["cells"] == 3
    assert found["budget"]["lowest_upper_bound"] == pytest.approx(1.2)
    assert found["budget"]["seconds_over_oracle"] == {
        edge: pytest.approx(4.5 / 4.8) for edge in ("ratio", "low", "high")}
    # oracle's 1 + 1.9 + 1.9 s; the best fixed setting takes 1, 2.4 and 2.4
    assert found["budget"]["regret"] == pytest.approx(4.5 / 4.8 - 1)
    whole = cases | {"d": case(None, "stop", TIMES)}
    assert controller_stats.summarize(whole) == found
    assert controller_stats.summarize({"d": whole["d"]}) == {"heavy": {}, "heavy_useful": {}}
    assert found["ceiling"] == pytest.approx(2.0 * 1.9 / 2.0)  # over 1x1x2, as it was chosen
    assert found["heavy"]["cells"] == 2
    assert found["heavy_useful"]["cells"] == 1 and found["heavy_useful"]["budget"] == {
        "ratio": pytest.approx(2), "low": pytest.approx(2), "high": pytest.approx(2)}
    controller_stats.draw(cases, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("ceiling, cells", [(1.04, 0), (1.06, 1)])
def test_a_drafter_is_useful_where_foresight_gains_what_is_asked(ceiling: float, cells: int
                                                                 ) -> None:
    """Over off, whatever is the best fixed setting; the ceiling of a case is over that one."""
    own = case(None, "heavy", TIMES)
    off, best = (sorted(own["choosing"][n])[0] for n in ("off", own["best_fixed"]))
    assert best < off
    own["ceiling"] = ceiling * best / off
    found = controller_stats.summarize({"a": own})
    assert found["heavy"]["cells"] == 1 and found["heavy_useful"].get("cells", 0) == cells
    del own["ceiling"]  # as where no setting is a chain
    assert controller_stats.summarize({"a": own})["heavy_useful"]["cells"] == 1


def test_cells_by_name() -> None:
    assert len(controller_cells.SMALL) == 48 and len({c.name for c in controller_cells.SMALL}) == 48
    assert [c.name for c in controller_cells.SMOLLM2 if c.lengths != "stop"] == [
        "1x64-own-uniform", "1x64-own-heavy", "4x64-own-uniform", "4x64-own-heavy",
        "16x64-own-uniform", "16x64-own-heavy", "4x512-own-heavy", "64x64-own-heavy"]
    assert controller_cells.SMOLLM2[-1].name == "64x64-own-stop"
    assert controller_cells.pick(controller_cells.SMALL, ["4x1024-0.4-heavy"]) == [
        Cell(4, 1024, 0.4, "heavy")]
    with pytest.raises(ConfigError, match="--cells=4x4"):
        controller_cells.pick(controller_cells.SMALL, ["4x4"])


def tiny_shape() -> Shape:
    arch = dataclasses.replace(TINY, num_layers=1)
    source = Source(arch, byte_tokenizer(), random_tensors(arch, 0), "tiny")
    config = Config(model=ModelSource("random:tiny"), rollout=RolloutConfig(max_new_tokens=16))
    return Shape(config, source, jax.device_put(source.params()),
                 {len(prompt): [[prompt] * 2] * 4 for prompt in ([1, 2, 3], [1, 2, 3] * 5)}, (),
                 "replay", controller.POLICIES, CompilationCounter())


def test_engines_that_do_not_fit_a_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA would abort while it compiles the next one."""
    held = iter([1_000, 30_000, 30_000])
    monkeypatch.setattr(machine, "maps", lambda: (next(held), 58_999))
    with pytest.raises(ConfigError, match="'fixed' has some 29000 memory maps, 30000 of 58999"):
        tiny_shape()


@pytest.mark.slow
def test_a_cell_of_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = tiny_shape()
    ran: list[tuple[str, int]] = []
    names = {id(s): name for name, s in shape.policies.items()}
    plainly, names[id(shape.plain)] = shape.run, "off"

    def run(sampler: Any, load: int) -> Run:
        ran.append((names.get(id(sampler), "fixed"), load))
        assert {len(prompt) for prompt in shape.loads[load]} == {shape.cell.context}
        return plainly(sampler, load)

    monkeypatch.setattr(shape, "run", run)
    for context, corruption, lengths in (
            (15, 0.0, "heavy"), (3, 0.0, "heavy"), (3, 1.0, "uniform")):
        cell = Cell(2, context, corruption, lengths)
        ran.clear()
        found = json.loads(json.dumps(controller.run_cell(shape, cell, 2, 0.0, 0.0)))
        assert [load for name, load in ran if name == "budget"] == [0, 1, 0, 1, 3, 2]
        assert [load for name, load in ran if name == "fixed"][-6:] == [3, 3, 3, 2, 2, 2]
        assert found["compilations"] == 0 and all(found["equal_tokens"].values())
        assert found["loads"] == 4
        assert list(found["arms"]) == ["off", "1x1x2", "2x1x3", "4x1x5", *controller.POLICIES]
        assert found["ceiling"] > 0.5 and np.isfinite(
            shape.policies["oracle"].engine.control.own.gain).all()
        assert found["arms"]["budget"]["pairs"] == 2 and found["cost_error"]["budget"] >= 0
        accept = found["accept_length"]
        assert (accept["4x1x5"] > 2.5) == (corruption == 0) and accept["off"] == 1
        explained = found["explained"]
        assert ("control/launches" in explained["budget"]) == (lengths == "heavy")
        assert all(told["control/predicted_seconds"] > 0 for told in explained.values())
        assert "time/launches" not in explained["respec"]
        drafting = [shape.fixed.engine, *(s.engine for s in shape.policies.values())]
        assert sum(engine._pool is not None for engine in drafting) == 1  # taken by turns
    assert accept["budget"] == 1
    shape.keep(["budget"])
    assert list(shape.policies) == ["budget"] and shape.fixed.engine._pool is not None
    before = shape.policies["budget"].cost_record
    shape.price_rounds()
    assert shape.policies["budget"].cost_record.measured != before.measured
    ran.clear()
    runs = controller.fight(shape, cell._replace(corruption=0.0), "1x1x2", 1)
    assert [load for name, load in ran if name == "budget"] == [0, 1, 0, 1, 3, 2, 3, 2]
    ran.clear()
    clock = iter([0, 50, 55, 70])
    with monkeypatch.context() as patch:
        patch.setattr(controller, "time", SimpleNamespace(perf_counter=clock.__next__))
        more = controller.fight(shape, cell._replace(corruption=0.0), "1x1x2", 1, 60)
    assert {name: len(of) for name, of in more.items()} == {"1x1x2": 12, "budget": 12}
    assert not list(clock) and controller.same(more)
    assert [load for name, load in ran if name == "budget"] == [0, 1, 0, 1, *[3, 2] * 6]
    assert controller.same(runs) and not controller.same({"a": [runs["budget"][0]],
                                                          "b": [runs["budget"][1]]})
    assert {name: len(of) for name, of in runs.items()} == {"1x1x2": 4, "budget": 4}
    assert not any(run.compilations for of in runs.values() for run in of)
    assert runs["1x1x2"][0].accept_length > 1.5


OCCASIONS = """
import sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv.pop(1))
import bench_controller as script
from absl import flags
from bench import controller, controller_stats, results
from bench.controller_cells import Cell

flags.FLAGS(sys.argv)
done, run = [], SimpleNamespace(seconds=1.0, compilations=0)

def shape(rows, contexts, stops, policies):
    done.append(f"{rows} made for {contexts}, {policies}")
    return SimpleNamespace(price_rounds=lambda: done.append(f"{rows} priced"))

def fight(shape, cell, best, occasion, seconds):
    done.append(f"{cell.name} {occasion} {seconds:g} s")
    return {best: [run], "budget": [run]}

controller.fight, controller.same, results.write = fight, lambda runs: True, lambda *args: None
cells = [Cell(1, 64, None, "uniform"), Cell(1, 64, None, "heavy"), Cell(4, 64, 0.0, "uniform"),
         Cell(4, 1024, 0.0, "uniform")]
first = controller_stats.describe({"off": [1.0]}, {"off": [1.0] * 2, "budget": [1.0] * 2}, {})
cases = {cell.name: first | {"cell": cell._asdict(), "equal_tokens": {"budget": True},
                             "compilations": 0, "command": "one"} for cell in cells}
result = {"cases": cases, "command": "other", "machine": "its"}
shapes = None if sys.argv[-1] == "anew" else {}
if sys.argv[-1] == "keep":
    shapes[4, (64, 1024), False] = shape(4, (64, 1024), False, "all")
while script.fought_again(SimpleNamespace(shape=shape), shapes, cells, result, 3, None):
    pass
told = {(case["command"], case["later_command"], case["later_machine"]) for case in cases.values()}
assert told == {("one", "other", "its")}, told
print("; ".join(done))
"""


@pytest.mark.parametrize("engines", ["keep", "resumed", "anew"])
def test_engines_are_kept_or_made_anew_for_each_occasion(tmp_path: Path, engines: str) -> None:
    """Those that are kept were made when their cells were chosen, or for the next occasion."""
    script = tmp_path / "occasions.py"
    script.write_text(OCCASIONS)
    ended = subprocess.run([sys.executable, script, ROOT / "experiments", engines],
                           text=True, capture_output=True, env=environment(), timeout=300)
    both = ["1 made for (64,), ['budget']", "4 made for (64, 1024), ['budget']"]
    wanted = []
    made = {"keep": [[both[0], ""], ["", ""]], "resumed": [both, ["", ""]], "anew": [both] * 2}
    if engines == "keep":
        wanted = ["4 made for (64, 1024), all"]
    for done, (one, four) in enumerate(made[engines], 1):
        timed = f"{done} {90 if engines == 'anew' else 0} s"
        wanted += [one, "1 priced", f"1x64-own-uniform {timed}", f"1x64-own-heavy {timed}", four,
                   "4 priced", f"4x64-0-uniform {timed}", f"4x1024-0-uniform {timed}"]
    assert ended.stdout.strip().split("; ") == [text for text in wanted if text], ended.stderr


@pytest.mark.slow
@pytest.mark.long
def test_the_script_resumes_by_cell(command: Any, tmp_path: Path) -> None:
    """What is there stays as it is; what is added names the command and machine it is of."""
    out = tmp_path / "cells.json"
    quick = ("--policies=budget", "--repeats=2", "--seconds=0", "--occasions=1", f"--out={out}")
    first, second = "1x64-0-uniform", "1x64-1-uniform"
    assert command("bench_controller.py", *quick, f"--cells={first}").returncode == 0
    before = json.loads(out.read_text())
    assert set(before["cases"]) == {first}
    both = f"--cells={first},{second}"
    ended = command("bench_controller.py", *quick, both, "--resume")
    assert ended.returncode == 0 and first not in ended.stderr, ended.stderr
    after = json.loads(out.read_text())
    assert after["cases"][first] == before["cases"][first]
    assert before["cases"][first]["command"] == before["command"] != after["command"]
    added = after["cases"][second]
    assert both in added["command"] and added["machine"] == after["machine"] == before["machine"]
    assert out.with_suffix(".png").stat().st_size > 1000
    refused = command("bench_controller.py", *quick, both, "--resume", "--config.seed=1")
    assert refused.returncode == 2 and "another config" in refused.stderr
