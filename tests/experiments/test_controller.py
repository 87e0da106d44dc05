"""The controller benchmark: its statistics, and one cell of a tiny model."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.studies import controller_cells, controller_runs, controller_stats
from experiments.studies.controller_cells import Bench, Cell
from experiments.studies.controller_runs import Shape
from specrl_jax.config import Config, ConfigError, ModelSource, RolloutConfig
from specrl_jax.model.tiny import TINY, byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source

CHOOSING = {"off": [2.0] * 4, "1x1x2": [1.9] * 4}
TIMES = {"off": [2.2] * 4, "1x1x2": [2.4] * 4, "budget": [2.0] * 4}


def test_best_fixed_is_chosen_by_other_runs() -> None:
    assert controller_stats.best_fixed(CHOOSING) == "1x1x2"  # off by the runs that time it
    choosing = {"off": [2.0] * 2, "1x1x2": [1.9] * 4, "2x1x3": [1.0, 9.0, 9.0, 9.0]}
    assert controller_stats.best_fixed(choosing) == "1x1x2"
    assert controller_stats.near(CHOOSING) == ["off", "1x1x2"]


def case() -> dict[str, Any]:
    actual = {"best_fixed": "1x1x2", "seconds": TIMES, "duels": [], "explained": {"budget": {}}}
    return actual | {"arms": controller_stats.arms(actual)}


def test_arms_are_ratios_over_the_best_fixed_setting() -> None:
    arms = case()["arms"]
    assert arms["1x1x2"]["ratio"] == 1
    for edge in ("ratio", "low", "high"):
        assert arms["budget"][edge] == pytest.approx(1.2), "pairs that agree leave no doubt"
    assert arms["budget"]["pairs"] == 4 and arms["budget"]["median_seconds"] == 2.0


def test_summary_is_a_geometric_mean_over_cells() -> None:
    other = case()
    other["arms"] = other["arms"] | {"budget": other["arms"]["budget"] | {"ratio": 0.9}}
    actual = controller_stats.summarize({"a": case(), "b": other})["budget"]
    assert actual["ratio"] == pytest.approx(math.sqrt(1.2 * 0.9))
    assert actual["worst"] == "b" and actual["cells"] == 2


def test_picked_cells_share_engines() -> None:
    picked = controller_cells.pick("small", ["4x1024-0.4-heavy", "4x64-1-uniform"])
    assert picked == {(4, (64, 1024), False): [Cell(4, 1024, 0.4, "heavy"),
                                               Cell(4, 64, 1.0, "uniform")]}
    with pytest.raises(ConfigError, match="--cells=4x4"):
        controller_cells.pick("small", ["4x4"])


def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> Shape:
    arch = dataclasses.replace(TINY, num_layers=1)
    source = Source(arch, byte_tokenizer(), random_tensors(arch, 0), "tiny")
    monkeypatch.setattr(controller_cells, "SMALL_TOKENS", {2: 16})
    bench = Bench(Config(model=ModelSource("random:tiny"), rollout=RolloutConfig()), source,
                  jax.device_put(source.params()), (), controller_cells.REPLAY, None)
    return Shape(bench, (2, (3, 15), False), controller_runs.POLICIES)


@pytest.mark.ci
def test_cell_of_a_tiny_model_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = tiny_shape(monkeypatch)
    ran: list[tuple[str, int]] = []
    names = {id(s): name for name, s in shape.policies.items()}
    plainly, names[id(shape.plain)] = shape.run, "off"

    def run(sampler: Any, load: int) -> Any:
        ran.append((names.get(id(sampler), "fixed"), load))
        return plainly(sampler, load)

    monkeypatch.setattr(shape, "run", run)
    for context, corruption, lengths in ((15, 0.0, "heavy"), (3, 1.0, "uniform")):
        ran.clear()
        cell = Cell(2, context, corruption, lengths)
        actual = json.loads(json.dumps(controller_runs.run_cell(shape, cell, 2, 0.0)))
        assert [load for name, load in ran if name == "budget"] == [0, 1, 2, 3, 7, 6]
        assert [load for name, load in ran if name == "fixed"][-6:] == [7, 7, 7, 6, 6, 6]
        assert actual["compilations"] == 0 and actual["equal_tokens"]
        arms = controller_stats.arms(actual)
        assert list(arms) == ["off", "1x1x2", "2x1x3", "4x1x5", *controller_runs.POLICIES]
        assert arms["budget"]["pairs"] == 2
        accept = actual["accept_length"]
        assert (accept["4x1x5"] > 2.5) == (corruption == 0) and accept["off"] == 1
        assert actual["explained"]["budget"]["control/predicted_seconds"] > 0
    assert accept["budget"] < 1.2


def test_bad_cell_is_refused_in_one_line(command: Any, tmp_path: Path) -> None:
    done = command("bench.py", "controller", "--cells=9x9", f"--out={tmp_path / 'x.json'}")
    assert done.returncode == 2 and "--cells=9x9" in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
