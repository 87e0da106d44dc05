"""Model families: registered ones, and one of one's own that differs by a field and a name."""

import json
from pathlib import Path

import numpy as np
import pytest

from specrl_jax.config import ConfigError
from specrl_jax.model import tiny
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.export import export
from specrl_jax.model.families import Family
from specrl_jax.model.tensors import pack
from specrl_jax.model.weights import describe_source

# Llama whose bias is a field of config.json, and whose norms have other names.
MINE = Family(
    "mine", "MineForCausalLM", supported={"attention_bias": (True, False, None)},
    read=lambda fields: {"qkv_bias": fields.flag("attention_bias", False)},
    written={"attention_bias": True},
    tensor_names={"input_layernorm": "norm_1", "model.norm": "model.last_norm"})
NAME = f"{__name__}:MINE"
ARCH = Architecture(vocab_size=260, hidden_size=12, intermediate_size=8, num_layers=2, num_heads=6,
                    num_kv_heads=2, head_dim=4, qkv_bias=True, family=NAME)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    params = pack(ARCH, tiny.random_tensors(ARCH, seed=3))
    export(tmp_path / "model", ARCH, params, tiny.byte_tokenizer())
    return tmp_path / "model"


def test_family_by_module_and_name_round_trips(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mine", ["MineForCausalLM"])
    actual = describe_source(str(directory), family=NAME)
    assert actual.arch == ARCH
    wanted = pack(ARCH, tiny.random_tensors(ARCH, seed=3))
    np.testing.assert_array_equal(actual.params()["layers"][1]["attn_norm"],
                                  wanted["layers"][1]["attn_norm"])


def test_family_that_is_not_registered_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="model_type = 'mine': choose llama, qwen2, qwen3, or "
                                          "name a family in model.family"):
        describe_source(str(directory))
    with pytest.raises(ConfigError, match="model.family = 'your': choose one of llama"):
        describe_source(str(directory), family="your")
