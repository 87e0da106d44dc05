"""bench.py: its commands, bounds of rounds, timing, result files, and the worth of adapting."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

from experiments.bench import arms, grids, hardware, results, roofline, timing
from experiments.bench.arms import TIMED, WARM_UP, Arm, Cell
from experiments.bench.grids import PAPER
from experiments.bench.hardware import Hardware
from experiments.compile import work
from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError, ModelSource, RolloutConfig
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.source import open_actor
from specrl_jax.runtime.compilation import CompilationCounter

ARCH = Architecture(vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
                    num_kv_heads=2, head_dim=4)
MACHINE = Hardware(1e9, 1e12, {"sum": 1e9}, {"a @ b": 1e12})


def test_device_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", none)
    for ask in (hardware.machine, hardware.first_device):
        with pytest.raises(SystemExit, match="^error: JAX_PLATFORMS = .*: JAX finds no such dev"):
            ask()


@pytest.mark.ci
def test_bench_help_lists_every_benchmark_and_each_one_starts(command):
    listed = re.findall(r"^  (\w+) +\S", command("bench.py", "--help").stdout, re.MULTILINE)
    assert {"rollouts", "speculation", "controller", "kernels"} < set(listed)
    for name in listed:
        done = command("bench.py", name, "--help")
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


TINY = "--config.model.path=random:tiny"
OTHERS = dict.fromkeys(("off", "history 0", "history 9x1x10", "history budget"), {})


@pytest.mark.parametrize("arguments, made, message", [
    ("rollout", {}, "error: rollout: no such benchmark; choose one of contract,"),
    (f"speculation {TINY} --setting=4x1x5 --resume", {"cases": {"1": {"arms": OTHERS}}},
     "1 rows were timed with other arms (history 4x1x5, history 9x1x10)"),
    (f"speculation {TINY} --policy=greedy", {}, "--policy=greedy: choose some of budget, respec"),
    (f"speculation {TINY} --setting=4x2", {}, "--setting"),
    ("controller --cells=9x9", {}, "--cells=9x9"),
    ("staleness --config=staleness --questions=why", {}, "--questions=why: choose some of modes"),
    ("staleness --config=staleness --questions=all --arms=once", {}, "--arms=once: belongs to one"),
    ("staleness --config=staleness --head=there --head_updates=5", {}, "--head is trained already"),
    ("staleness --config=staleness", {"cases": {"0": {}}, "config": {"gone": 1}},
     "it was made with another config"),
    ("staleness --config=staleness --questions=bugs --config.draft.children=top", {},
     "error: bugs, arm rejection_drawn: draft.children = 'top': ")])
def test_bad_input_is_one_line_and_changes_no_result(
        command, arguments, made, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out.json"
    out.write_text(text := json.dumps({"heads": {}, "summary": {}, "cases": {}} | made))
    done = command("bench.py", *arguments.split(), f"--out={out}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
    assert out.read_text() == text and list(tmp_path.iterdir()) == [out]


def test_alternate_starts_each_repeat_with_the_next_task():
    order = []
    tasks = {name: (lambda name=name: order.append(name) or name) for name in "abc"}
    assert timing.alternate(tasks, 2) == {"a": ["a"] * 2, "b": ["b"] * 2, "c": ["c"] * 2}
    assert "".join(order) == "abcbca"


def test_rounds_bound_equals_hand_count():
    rows, context = np.asarray([2, 1]), np.asarray([10, 6])
    bound = roofline.rounds_bound(ARCH, MACHINE, rows, context, 1.0, 4)
    moved = 2 * work.weight_bytes(ARCH, 4) + 4 * 2 * 2 * 2 * 4 * (10 + 2 + 6 + 1)
    assert bound.kind == "bytes" and bound.seconds == pytest.approx(moved / 1e9)
    slow = dataclasses.replace(MACHINE, peak=1e6)
    flops = 2 * 3 * (work.layer_matmul_params(ARCH) + 24 * 16) + 4 * 2 * 4 * 4 * (16 + 3)
    bound = roofline.rounds_bound(ARCH, slow, rows, context, 1.0, 4)
    assert bound.kind == "flops" and bound.seconds == pytest.approx(flops / 1e6)


def test_results_earlier_reads_back_or_refuses(tmp_path):
    path = tmp_path / "a.json"
    assert results.earlier(path) == {}
    results.write(path, {"cases": {"uniform-1": {}}})
    assert results.earlier(path) == {"uniform-1": {}}
    results.write(path, {"cases": {"uniform-1": {}}, "architecture": {"eos": (1,)}})
    assert results.earlier(path, architecture={"eos": (1,)}) == {"uniform-1": {}}
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no result of a benchmark"):
        results.earlier(path)


@pytest.mark.ci
def test_speculation_case_times_every_arm_on_equal_tokens():
    config = Config(model=ModelSource("random:tiny"),
                    rollout=RolloutConfig(batch_size=2, max_new_tokens=6))
    actor = open_actor(config)
    params = actor.params(sharding.make_mesh(config.mesh))
    cells = [Cell(1, 1, 2), Cell(2, 1, 3)]
    actual = arms.run_case(config, actor.source, params, [[1, 2, 3], [4, 5], [6]], 2,
                           ["history"], cells, 2, CompilationCounter(), ["budget"])
    json.dumps(actual)
    assert (actual["rows"], actual["prompts"], actual["tokens"]) == (2, 3, 18)
    assert (actual["tokens_compared"], actual["flips_per_million_tokens"]) == (4 * 18, 0)
    timed = actual["arms"]
    assert list(timed) == ["off", "history 0", "history 1x1x2", "history 2x1x3", "history budget"]
    assert all(one["equal_tokens"] and one["compilations"] == 0 for one in timed.values())
    assert all(len(one["speedup"]["values"]) == 2 for one in timed.values())
    assert timed["off"]["accept_length"] == timed["history 0"]["accept_length"] == 1
    assert timed["history 0"]["drafted_a_row"] == 0


def test_earlier_responses_are_other_samples():
    config = Config(model=ModelSource("random:tiny"), rollout=RolloutConfig(max_new_tokens=6))
    actor = open_actor(config)
    prompts = [[1, 2, 3], [4, 5]]
    arm = Arm(config, actor.source, actor.params(sharding.make_mesh(config.mesh)), prompts, 2,
              "off", [Cell(1, 1, 2)], CompilationCounter())
    arm.compile()
    earlier = arm.earlier(3)
    runs = [arm.run(None, step) for step in (TIMED, WARM_UP)]
    assert [arms.describe([run], runs[:1])["flips"] for run in runs] == [0, 2]
    timed, calibrating = (run.result.sequences.tokens for run in runs)
    assert earlier.shape == (2, 3, 6)
    streams = np.concatenate([earlier, np.stack([timed, calibrating], 1)], 1)
    assert all(len(np.unique(row, axis=0)) == 5 for row in streams)


def test_adapting_papers_grid_equals_hand_computed_means() -> None:
    """Harmonic and geometric means of its seven loads, worked out by hand from Fig. 7."""
    actual = grids.adapting(PAPER)
    for way, harmonic, geometric in (("best static", 1.147, 1.163),
                                     ("best static or off", 1.190, 1.200),
                                     ("per load", 1.259, 1.270)):
        assert actual["harmonic"][way]["speed"] == pytest.approx(harmonic, abs=5e-4)
        assert actual["geometric"][way]["speed"] == pytest.approx(geometric, abs=5e-4)
    assert actual["geometric"]["per load"]["chosen"][64] == "off"
    assert 42 < actual["break_even"]["best of each load"] < 43


NOISY = {1: {"a": [2.0, 1.0] * 3, "b": [1.4, 1.5] * 3, "budget": [1.6, 1.5, 1.6, 1.6, 1.6, 1.7]},
         4: {"a": [0.9, 2.0] * 3, "b": [0.8, 0.8] * 3, "budget": [1.0] * 6}}


def test_adapting_chooses_and_judges_on_other_repeats() -> None:
    actual = grids.adapting(NOISY, ["budget"])["geometric"]
    assert actual["per load"]["chosen"] == {1: "a", 4: "off"}
    assert actual["per load"]["speed"] == pytest.approx(1.0)  # of a, in odd repeats, and of off
    assert actual["best static"]["speed"] == pytest.approx(math.sqrt(1.0 * 2.0))
    assert set(actual["best static"]["chosen"].values()) == {"a"}
