"""A small run compiled for GPUs that are not there, by XLA in JAX's CUDA plugin."""

import importlib.util
import json
from pathlib import Path

import pytest

from experiments.compile import compiling, findings, targets
from specrl_jax.config import load_config, override
from specrl_jax.structs import Json

pytestmark = [pytest.mark.full, pytest.mark.skipif(
    not any(map(importlib.util.find_spec, targets.PLUGINS)),
    reason='needs a CUDA plugin, such as pip install "jax[cuda13]"; no GPU')]


@pytest.mark.parametrize("target,data", [("h100", 1), ("h100:8", 8)])
def test_small_run_compiles(target: str, data: int, tmp_path: Path,
                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")  # those of the tests are for CPUs
    config = override(load_config("tiny"), {"model.dtype": "bfloat16", "mesh.data": data,
                                            "rollout.min_batch": 16})
    result = compiling.compile_for(config, target, folder=tmp_path)
    assert [line for actual in result["programs"] for line in findings.failures(actual)] == []
    assert result["devices"] == data and len(result["programs"]) > 8


def rounds(folder: Path, layers: int, head: int) -> dict[str, Json]:
    """What compiling the rounds of a model with EAGLE trees shows, by program."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen2", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": head, "max_position_embeddings": 4096}))
    config = override(load_config("tiny"), {
        "model.path": str(folder), "model.dtype": "bfloat16", "spec.drafter": "eagle",
        "draft.vocab": 512, "rollout.max_new_tokens": 896, "rollout.min_batch": 16})
    actual = compiling.compile_for(config, "h100", ("plain", "drafted"), folder=folder)["programs"]
    assert [one["program"] for one in actual] == ["plain round", "drafted round"]
    assert [line for one in actual for line in findings.failures(one)] == []
    return {one["program"]: one for one in actual}


@pytest.mark.parametrize("head,most", [(64, 16), (96, 24)], ids=["kernel", "xla"])
def test_round_starts_few_operations_a_layer_and_asks_the_host_once(
        head: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes heads of a power of two. A launch's own loop asks for a predicate a round;
    here is only that of a draft's levels, whose number is known, and the choice of a bucket."""
    monkeypatch.setenv("XLA_FLAGS", "")
    few, many = (rounds(tmp_path / str(layers), layers, head) for layers in (4, 8))
    least, largest = (one["plain round"]["operations"] for one in (few, many))
    a_layer = (largest - least) / 4
    assert a_layer <= most and largest - 8 * a_layer <= 60
    for title, count in (("plain round", 0), ("drafted round", 1)):
        kinds = many[title]["kinds"]
        assert kinds.get("while", 0) == kinds.get("conditional", 0) == count, title
