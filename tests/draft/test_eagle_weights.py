"""EAGLE-3 heads on disk."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import tiny_arch
from safetensors.numpy import load_file, save_file

from specrl_jax.config import ConfigError
from specrl_jax.draft import eagle_model, eagle_weights
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model.architecture import RopeScaling

ACTOR = tiny_arch(num_layers=8)
ARCH = EagleArch(ACTOR, draft_vocab=10, like=dataclasses.replace(
    ACTOR, num_heads=6, num_kv_heads=3, intermediate_size=10))
VOCAB = np.asarray([0, 2, 3, 5, 8, 13, 20, 21, 22, 23], np.int32)


def own(arch: EagleArch = ARCH) -> dict[str, Any]:
    vocab = VOCAB if arch.draft_vocab == 10 else np.arange(24, dtype=np.int32)
    return {"weights": eagle_model.initialize(arch, 1), "vocab": vocab}


def rewrite(folder: Path, config: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Replaces fields of config.json, and tensors; None removes one."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    path = folder / "model.safetensors"
    both = load_file(path) | {name.replace("__", "."): a for name, a in tensors.items()}
    save_file({name: a for name, a in both.items() if a is not None}, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    eagle_weights.save(tmp_path / "a" / "head", ARCH, own())
    return tmp_path / "a" / "head"


@pytest.mark.parametrize("changes", [
    {}, {"own_head": False}, {"draft_vocab": 0}, {"taps": (0, 5)},
    {"tap_norm": False}, {"state_norm": False},
    {"actor": dataclasses.replace(ACTOR, family="qwen3", qk_norm=True, rope_theta=5e5),
     "like": None},
    {"like": dataclasses.replace(ARCH.layer, norm_eps=1e-6, rope_theta=77.0,
                                 rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))}], ids=str)
def test_saved_head_is_loaded_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    arch = dataclasses.replace(ARCH, **changes)
    wanted = eagle_weights.MadeFor(tokenizer="12ab", actor="float32 00c0ffee")
    eagle_weights.save(tmp_path, arch, own(arch), wanted)
    loaded, actual, warnings, made_for = eagle_weights.load(tmp_path, arch.actor)
    assert loaded == arch and warnings == [] and made_for == wanted
    assert actual["vocab"].dtype == np.int32
    jax.tree.map(np.testing.assert_array_equal, actual, own(arch))


def test_names_and_contents_are_those_of_public_heads(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    attention = [f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"]
    mlp = [f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
    norms = [f"midlayer.{x}.weight" for x in ("hidden_norm", "input_layernorm",
                                              "post_attention_layernorm")]
    norms += [f"fc_norm.{i}.weight" for i in range(3)]
    assert set(tensors) == {*attention, *mlp, *norms, "norm.weight", "fc.weight", "lm_head.weight",
                            "d2t", "t2d"}
    np.testing.assert_array_equal(np.arange(10) + tensors["d2t"], VOCAB)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), VOCAB)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, bool)
    qkv = own()["weights"]["qkv"]  # [3, 2 + 2, 4, 32]
    heads = tensors[attention[0]].reshape(6, 4, 32)
    np.testing.assert_array_equal(heads[3], qkv[1, 1])
    np.testing.assert_array_equal(tensors[attention[2]].reshape(3, 4, 32)[2], qkv[2, 3])
    config = json.loads((folder / "config.json").read_text())
    assert config["fc_norm"] is config["norm_output"] is True
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (
        10, 24, 1)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_head_of_eagle_3_is_read_as_it_was_trained(folder: Path) -> None:
    old = dataclasses.replace(ARCH, tap_norm=False, state_norm=False)
    rewrite(folder, **dict.fromkeys([f"fc_norm__{i}__weight" for i in range(3)]))
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({name: fields[name] for name in fields.keys() - {
        "fc_norm", "norm_output"}}))
    arch, actual, _, _ = eagle_weights.load(folder, ACTOR)
    assert arch == old
    jax.tree.map(np.testing.assert_array_equal, actual, own(old))


def test_head_of_another_trainer_is_read(folder: Path) -> None:
    half = own()["weights"]["fc"].astype(ml_dtypes.bfloat16)
    rewrite(folder, {"eagle_config": None, "torch_dtype": "bfloat16"}, fc__weight=half, t2d=None,
            embed_tokens__weight=np.zeros((24, 16), np.float32))
    arch, actual, _, _ = eagle_weights.load(folder, ACTOR)
    assert arch == ARCH
    np.testing.assert_array_equal(actual["weights"]["fc"], half.astype(np.float32))
    assert actual["weights"]["fc"].dtype == np.float32


@pytest.mark.parametrize("config, tensors, words", [
    ({"hidden_size": 32, "head_dim": 4}, {}, "hidden_size = 32.*16"),
    ({"vocab_size": 30}, {}, "vocab_size = 30.*24"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state = False.*head"),
    ({"architectures": ["EagleLlamaForCausalLM"]}, {}, "architectures = .*EagleLlamaForCausalLM"),
    ({"norm_before_residual": True}, {}, "norm_before_residual"),
    ({"fc_norm": False}, {}, "fc_norm = False: must be true"),
    ({"norm_output": "yes"}, {}, "norm_output = 'yes'"),
    ({}, {"fc_norm__2__weight": None}, "fc_norm.2.weight is missing"),
    ({}, {f"fc_norm__{i}__weight": None for i in range(3)}, "fc_norm = True: .*false"),
    ({"specrl_jax": {"tokenizer": 3}}, {}, "specrl_jax = .*tokenizer.*remove"),
    ({}, {"fc__weight": np.zeros((16, 80), np.float32)}, "fc.weight = 80.*48"),
    ({}, {"d2t": np.zeros(10, np.float32)}, "d2t .*F32.*I64"),
    ({}, {"norm__weight": None}, "norm.weight is missing"),
    ({}, {"midlayer__bias": np.zeros(1)}, "midlayer.bias"),
    ({}, {"lm_head__weight": np.zeros((9, 16))}, r"lm_head.weight .*\(9, 16"),
    ({}, {"d2t": np.zeros(10, np.int64) - np.arange(10)}, "d2t.*ascending"),
    ({}, {"t2d": np.ones(24, bool)}, "t2d.*disagree")])
def test_head_that_does_not_fit_is_refused(
        folder: Path, config: dict[str, Any], tensors: dict[str, Any], words: str) -> None:
    rewrite(folder, config, **tensors)
    with pytest.raises(ConfigError, match=words) as caught:
        eagle_weights.load(folder, ACTOR)
    assert "\n" not in str(caught.value)


def test_file_that_is_no_head_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name, words in (("other", "no such file"), ("pytorch_model.bin", "pickle.*convert"),
                        ("model.safetensors", "damaged")):
        (folder / name).write_bytes(b"x" * 20)
        with pytest.raises(ConfigError, match=words):
            eagle_weights.load(folder, ACTOR)
