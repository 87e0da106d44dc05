import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrl_jax.config import ConfigError
from specrl_jax.model.architecture import RopeScaling
from specrl_jax.model.hf_config import parse_config, write_config

GOLDENS = Path(__file__).parent.parent / "goldens"
LLAMA = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 8,
         "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}


def test_defaults_are_transformers() -> None:
    arch = parse_config(LLAMA, "config.json")
    assert (arch.num_kv_heads, arch.head_dim, arch.max_position) == (4, 4, 2048)
    assert (arch.rope_theta, arch.norm_eps, arch.tied) == (10000.0, 1e-6, False)
    qwen3 = parse_config(LLAMA | {"model_type": "qwen3"}, "config.json")
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)
    assert parse_config(LLAMA | {"model_type": "qwen2"}, "config.json").qkv_bias


@pytest.mark.parametrize("options", [
    {"rope_theta": 5.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 5.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_theta": 5.0, "rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 5.0}, {"rope_theta": 5.0, "rope_scaling": None},
    {"rope_theta": 5.0, "rope_scaling": {"rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}])
def test_rope_of_transformers_4_and_5(options: dict[str, Any]) -> None:
    arch = parse_config(LLAMA | options, "config.json")
    scaled = RopeScaling(8.0, 1.0, 4.0, 32) if "llama3" in str(options) else None
    assert (arch.rope_theta, arch.rope_scaling) == (5.0, scaled)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
SCALED = {"rope_type": "llama3", **LLAMA3}
REFUSED = [  # (options, what the line must name)
    *[({name: value}, [name]) for name, value in (
        ("model_type", "mamba"), ("model_type", ["llama"]), ("hidden_act", "gelu"),
        ("attention_bias", True), ("mlp_bias", True), ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"bits": 4}), ("logits_scaling", 8.0),
        ("final_logit_softcapping", 30.0), ("tie_word_embeddings", "no"),
        ("rope_scaling", [{"rope_type": "llama3"}]), ("rope_parameters", "llama3"))],
    *[({name: 0}, [name, "whole number"]) for name in SIZES],
    *[({"vocab_size": value}, ["vocab_size", "whole number"]) for value in (-4, 4.5, "4", True)],
    *[({name: 0}, [name, "positive"]) for name in ("rope_theta", "rms_norm_eps")],
    *[({"rope_theta": value}, ["rope_theta", "positive"])
      for value in ("1e-5", False, [1.0], None, float("nan"), 10**400)],
    *[({"rope_scaling": SCALED | {name: value}}, [f"rope_scaling.{name}"])
      for name in LLAMA3 for value in (0, None)],
    ({"rope_parameters": {"rope_theta": -1}}, ["rope_parameters.rope_theta", "positive"]),
    ({"rope_parameters": SCALED | {"high_freq_factor": 1}},
     ["rope_parameters.high_freq_factor", "low_freq_factor"]),
    ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, ["full_attention"]),
    ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
     ["rope_theta = 5.0", "rope_parameters.rope_theta", "6.0"]),
    ({"rope_scaling": SCALED, "rope_parameters": {"rope_theta": 6.0}},
     ["rope_scaling.rope_type", "rope_parameters"]),
    *[({"rope_scaling": {name: value}}, [f"rope_scaling.{name}", str(value)]) for name, value in (
        ("rope_type", "yarn"), ("type", "linear"), ("rope_type", ["llama3"]))],
    ({"num_key_value_heads": 3}, ["num_attention_heads = 4", "multiple"]),
    *[({"hidden_size": value}, [f"hidden_size = {value}", "num_attention_heads = 4"])
      for value in (18, 2)],
    ({"head_dim": 5}, ["head_dim = 5", "even"])]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_cannot_work_are_refused_by_name(
        options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(LLAMA | options, "config.json")
    line = str(error.value)
    assert "\n" not in line and len(line) < 250 and line.startswith("config.json: ")
    assert [word for word in words if word not in line] == []


def test_null_setting_is_the_default_of_transformers() -> None:
    nothing = {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None,
               "rope_parameters": None, "layer_types": None, "quantization_config": None,
               "logits_scaling": 1.0, "final_logit_softcapping": None}
    assert parse_config(LLAMA | nothing, "config.json") == parse_config(LLAMA, "config.json")
    assert parse_config(LLAMA | {"hidden_size": 18, "head_dim": 6}, "config.json").head_dim == 6


@pytest.mark.parametrize("name", ["llama", "llama3_rope", "qwen2", "qwen3"])
def test_written_config_parses_back(name: str) -> None:
    arch = parse_config(json.loads(str(np.load(GOLDENS / f"{name}.npz")["config"])), name)
    written = write_config(arch)
    assert parse_config(json.loads(json.dumps(written)), name) == arch
    for form in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        assert parse_config({k: v for k, v in written.items() if k not in form}, name) == arch
