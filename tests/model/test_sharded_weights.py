"""Each process reads the parts of a checkpoint that its devices hold."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import HANGS, script_environment
from pairs import free_port
from safetensors.numpy import save_file

from specrl_jax import sharding
from specrl_jax.config import MeshConfig
from specrl_jax.model import architecture, layers, tiny
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.export import export
from specrl_jax.model.hf_config import write_config
from specrl_jax.model.tensors import Part, Tensors, pack, tensor_shapes
from specrl_jax.model.weights import describe_source
from specrl_jax.structs import PyTree

SMALL = Architecture(vocab_size=260, hidden_size=12, intermediate_size=8, num_layers=3,
                     num_heads=12, num_kv_heads=4, head_dim=4)
FAMILIES = {"llama": SMALL,
            "qwen2": dataclasses.replace(SMALL, family="qwen2", qkv_bias=True, tied=False),
            "qwen3": dataclasses.replace(SMALL, family="qwen3", qk_norm=True, num_heads=4)}
LOAD = """
import resource, sys
import jax
from specrl_jax import sharding
from specrl_jax.config import MeshConfig
from specrl_jax.model import architecture
from specrl_jax.model.weights import describe_source
directory, address, process = sys.argv[1:]
jax.distributed.initialize(address, 2, int(process))
source = describe_source(directory)
wanted = sharding.shardings(architecture.describe(source.arch), sharding.LEARNER_RULES,
                            sharding.make_mesh(MeshConfig(fsdp=2)))
params = jax.block_until_ready(source.params(wanted))
print(sum(shard.data.nbytes for a in jax.tree.leaves(params) for shard in a.addressable_shards),
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
needs_8 = pytest.mark.skipif(jax.device_count() < 8, reason="see XLA_FLAGS in tests/conftest.py")


def placed(arch: Architecture, mesh: MeshConfig, stacked: bool = False) -> PyTree:
    return sharding.shardings(architecture.describe(arch, stacked), sharding.LEARNER_RULES,
                              sharding.make_mesh(mesh))


@needs_8
@pytest.mark.parametrize("arch", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("mesh", [MeshConfig(1, 2, 2), MeshConfig(2, 1, 4)], ids=str)
@pytest.mark.parametrize("stacked", [False, True], ids=("list", "stacked"))
def test_devices_hold_their_parts_of_one_model(tmp_path: Path, arch: Architecture,
                                               mesh: MeshConfig, stacked: bool) -> None:
    export(tmp_path / "model", arch, pack(arch, tiny.random_tensors(arch, seed=3)),
           tiny.byte_tokenizer())
    source = describe_source(str(tmp_path / "model"))
    wanted = placed(arch, mesh, stacked)
    params = source.params(wanted)
    assert jax.tree.all(jax.tree.map(lambda a, where: a.sharding == where, params, wanted))
    jax.tree.map(np.testing.assert_array_equal, layers.arrange(params, stacked=False),
                 source.params())


@needs_8
@pytest.mark.parametrize("mesh", [MeshConfig(1, 2, 2), MeshConfig(2, 2, 2)], ids=str)
@pytest.mark.parametrize("stacked", [False, True], ids=("list", "stacked"))
def test_each_part_is_read_once(mesh: MeshConfig, stacked: bool) -> None:
    """A quarter of a matrix at a time, and no part twice, though both halves of `data` hold it."""
    read: dict[str, list[Part]] = {}
    tensors = tiny.random_tensors(SMALL, seed=1)

    def noted(name: str, part: Part) -> np.ndarray:
        read.setdefault(name, []).append(part)
        return tensors.read_part(name, part)

    pack(SMALL, Tensors(tensors.shapes, noted), placed(SMALL, mesh, stacked))
    assert read.keys() == tensors.shapes.keys()
    for name, parts in read.items():
        sizes = [math.prod(end - first for first, end in part) for part in parts]
        whole = math.prod(tensors.shapes[name])
        assert sum(sizes) == whole, name
        assert max(sizes) == whole / (4 if len(tensors.shapes[name]) == 2 else 2), name


@pytest.mark.full
def test_two_processes_hold_hardly_more_than_their_parts(tmp_path: Path) -> None:
    """Each half of a bfloat16 directory of 2 GB, which is 2 GB in float32."""
    arch = dataclasses.replace(SMALL, vocab_size=32768, hidden_size=2048, intermediate_size=8192,
                               num_layers=16, num_heads=16, head_dim=128)
    write_random(tmp_path / "model", arch)
    address = f"127.0.0.1:{free_port()}"
    processes = [subprocess.Popen(
        [sys.executable, "-c", LOAD, str(tmp_path / "model"), address, str(i)],
        stdout=subprocess.PIPE, text=True, env=script_environment()) for i in range(2)]
    try:
        for process in processes:
            held, peak = map(int, process.communicate(timeout=HANGS)[0].split())
            assert process.returncode == 0 and held > 2e9
            assert peak < 1.3 * held
    finally:
        for process in processes:
            process.kill()


def write_random(directory: Path, arch: Architecture) -> None:
    """Writes a directory whose tensors are all parts of one random array, to be quick."""
    directory.mkdir()
    noise = np.random.default_rng(0).standard_normal(2**27, np.float32).astype(ml_dtypes.bfloat16)
    save_file({name: noise[: math.prod(shape)].reshape(shape)
               for name, shape in tensor_shapes(arch).items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(write_config(arch)))
    tokenizer = tiny.byte_tokenizer()
    (directory / "tokenizer.json").write_text(tokenizer.backend.to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": tokenizer.template, "eos_token": tokenizer.eos_token}))
