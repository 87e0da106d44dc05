"""The controller benchmark: one cell of a tiny model."""

import dataclasses
import json
from typing import Any

import jax
import pytest

from experiments.studies import controller_cells, controller_runs, controller_stats
from experiments.studies.controller_cells import Bench, Cell
from experiments.studies.controller_runs import Shape
from specrl_jax.config import Config, ModelSource, RolloutConfig
from specrl_jax.model.tiny import TINY, byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source


@pytest.mark.ci
def test_cell_of_a_tiny_model_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = dataclasses.replace(TINY, num_layers=1)
    source = Source(arch, byte_tokenizer(), random_tensors(arch, 0), "tiny")
    monkeypatch.setattr(controller_cells, "SMALL_TOKENS", {2: 16})
    bench = Bench(Config(model=ModelSource("random:tiny"), rollout=RolloutConfig()), source,
                  jax.device_put(source.params()), (), controller_cells.REPLAY, None)
    shape = Shape(bench, (2, (3, 15), False), controller_runs.POLICIES)
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
