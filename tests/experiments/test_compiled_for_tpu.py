"""A small run and the kernels, compiled for TPUs that are not there, by libtpu's compiler.

`.ci/run` has an environment with libtpu for them. They take a minute or two of one core.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.compile import compiling, findings, targets
from specrl_jax.config import Config, ConfigError, load_config, override

pytestmark = [pytest.mark.ci, pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu: .ci/run makes an environment with it")]
LAYERS, VOCAB = 2, 2048

KERNELS = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh
from specrl_kernels.cache_append import cache_append, row_append
from specrl_kernels.head_argmax import head_argmax
from specrl_kernels.tree_attention import tree_attention
device = topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
b, n, g, r, s, half, ints = 4, 8, 2, 4, 1024, jnp.bfloat16, jnp.int32
kind = AbstractDevice("TPU v5 lite", 1, "tpu")
def compiled(function, *args):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        lowered = jax.jit(function).lower(*args)
    print(lowered.compile().as_text().count("tpu_custom_call"))
for e in (64, 128):
    args = (of(half, b * n, g * r, e), of(ints, b * n), of(ints, b * n), of(half, b, n, g, e),
            of(half, b, n, g, e), of(ints, b, n), of(half, b, g, e, s), of(half, b, g, s, e),
            of(ints, b))
    named = dict(implementation="pallas", platform="tpu")
    compiled(lambda *a: tree_attention(*a, scale=0.1, **named), *args)
    for tokens in (1, 5):
        compiled(lambda c, *a: cache_append([c, c + 1], *a, **named), of(half, b, 3, g, e, s),
                 of(half, tokens, 3, 2, g, e, b), of(ints, b), of(ints, b))
        compiled(lambda *a: row_append(*a, **named), of(half, b, s, 256), of(half, b, tokens, 256),
                 of(ints, b), of(ints, b))
for w in (3, 48, 130):
    compiled(lambda *a: head_argmax(*a, **named), of(half, 256, w), of(half, 3000, 256),
             of(jnp.float32, w), of(jnp.uint32, w, 2), of(ints, w))
"""


def small(folder: Path, head: int) -> Config:
    """A run of few layers with EAGLE trees, of a model that is only a config.json."""
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 4 * head,
        "intermediate_size": 8 * head, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096}))
    return override(load_config("tiny"), {
        "model.path": str(folder), "model.dtype": "bfloat16", "mesh.data": 2, "mesh.fsdp": 2,
        "mesh.tensor": 2, "spec.drafter": "eagle", "draft.vocab": 512,
        "rollout.max_new_tokens": 896, "rollout.min_batch": 16})


def test_kernels_compile() -> None:
    environment = targets.environment() | {
        "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    actual = subprocess.run([sys.executable, "-c", KERNELS], capture_output=True, text=True,
                            env=environment)
    assert actual.returncode == 0, actual.stderr[-2000:]
    counts = actual.stdout.split()
    assert len(counts) == 13 and all(int(count) > 0 for count in counts)


def test_launch_with_trees_and_update_compile_on_2x2x2(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")  # those of the tests are for CPUs
    config, keep = small(tmp_path, 128), tmp_path / "kept"
    result = compiling.compile_for(config, "v5e:2x4", ("launch", "update"), folder=keep)
    programs = result["programs"]
    assert [actual["program"].split()[0] for actual in programs] == ["launch", "update"]
    assert [actual["error"] for actual in programs if "error" in actual] == []
    assert all(findings.memory(actual) < actual["limit"] for actual in programs)
    assert all(actual["aliased"] == actual["donated"] for actual in programs)
    assert [actual["copies"] for actual in programs] == [[], []]
    ticks = programs[0]["clock"]  # of all branches; as a scatter the append takes 308,000
    draw = ticks["kernels"]["head_argmax"]
    assert 0 < ticks["parts"]["append"] < 200_000
    assert 0 < draw["memory"] < 20_000 and 0 < draw["compute"] < 31_000
    again = compiling.compile_for(config, "v5e:2x4", ("launch", "update"), folder=keep)
    assert all(actual["kept"] for actual in again["programs"])


def test_topology_of_no_whole_hosts_is_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(ConfigError, match="^target = 'v5e:3x3': .*give a topology of whole hosts"):
        compiling.compile_for(small(tmp_path, 64), "v5e:3x3", folder=tmp_path)
