"""The search for block sizes on made-up times, and the table that it fills."""

import math
from pathlib import Path
from typing import Any

import pytest
from specrl_kernels import tuning

from experiments.bench import tune
from experiments.bench.kernel_shapes import TreeShape

SHAPE = TreeShape("Qwen2.5-7B", 8, 8, 4096)
BEST = {"block": 32, "tile": 64, "warps": 8, "stages": 3, "splits": 16, "least": 8}


def seconds(config: dict[str, int]) -> float | None:
    """A bowl around a block of 16, with which nothing runs, and else BEST."""
    if config["block"] == 16:
        return None
    bottom = BEST | {"block": 16}
    away = sum(abs(math.log2(config[name] / value)) for name, value in bottom.items())
    return 1e-4 * (1 + away)


def search(monkeypatch: pytest.MonkeyPatch, time: Any, budget: float = 60.0) -> tune.Search:
    monkeypatch.setattr(tune.Search, "_seconds", lambda self, shape, name, config: time(config))
    return tune.Search("gpu", False, 1, budget)


def test_the_search_finds_the_fastest_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    row = search(monkeypatch, seconds).best(SHAPE, "pallas_triton")
    first = tune.heuristic(SHAPE, "pallas_triton", "NVIDIA H200", 2)
    assert row["config"] == BEST and row["microseconds"] == 200
    assert row["heuristic"] == {"config": first, "microseconds": round(1e6 * seconds(first), 2)}
    assert row["shape"] == tune.shape_key(SHAPE) and row["dtype"] == "bfloat16"


def test_what_is_not_faster_by_a_percent_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tune.heuristic(SHAPE, "pallas_triton", "NVIDIA H200", 2)
    row = search(monkeypatch, lambda config: 1.0 if config == first else 0.995).best(
        SHAPE, "pallas_triton")
    assert row["config"] == first


def test_a_search_out_of_time_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    row = search(monkeypatch, seconds, budget=0.0).best(SHAPE, "pallas_triton")
    assert row["config"] == row["heuristic"]["config"]


def test_a_heuristic_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="pallas_triton with .* does not run at Qwen2.5-7B"):
        search(monkeypatch, lambda config: None).best(SHAPE, "pallas_triton")


def test_a_table_is_taken_up_again_and_is_what_kernels_look_into(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    path = tmp_path / tuning.file_name("NVIDIA H200")
    row = search(monkeypatch, seconds).best(SHAPE, "pallas_triton")
    tune.Table(path, "NVIDIA H200").add(row)
    other = row | {"shape": row["shape"] | {"rows": 1024}}
    tune.Table(path, "NVIDIA H200").add(dict(other))
    tune.Table(path, "NVIDIA H200").add(row | {"microseconds": 7.0})
    table = tune.Table(path, "NVIDIA H200")
    assert table.holds(SHAPE, "pallas_triton", "bfloat16")
    assert not table.holds(SHAPE, "pallas_triton", "float32")
    assert sorted(row["microseconds"] for row in table.found["rows"]) == [7.0, 200.0]
    asked = ("NVIDIA H200", "tree_attention", "pallas_triton")
    assert tuning.lookup(*asked, tune.shape_key(SHAPE), "bfloat16") == BEST
    assert tuning.lookup(*asked, tune.shape_key(SHAPE) | {"rows": 2}, "bfloat16") is None
    table.versions = {"jax": "another"}
    assert not table.holds(SHAPE, "pallas_triton", "bfloat16")
