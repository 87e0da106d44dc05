"""A small run compiled for GPUs that are not there, by XLA in JAX's CUDA plugin."""

import importlib.util
from pathlib import Path

import pytest

from experiments.aot import compiling, findings, targets
from specrl_jax.config import load_config, override

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
    assert [line for found in result["programs"] for line in findings.failures(found)] == []
    assert result["devices"] == data and len(result["programs"]) > 8
