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


@pytest.mark.parametrize(("options", "message"), [
    ({"model_type": "mamba"}, "model_type = 'mamba': choose llama"),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"), ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"layer_types": ["linear_attention"]}, "layer_types = 'linear_attention'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"logits_scaling": 8.0}, "logits_scaling = 8.0: is not supported"),
    ({"logit_scale": 0.0625}, "logit_scale"), ({"attention_multiplier": 0.5}, "attention_mult"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
     "rope_theta = 5.0: rope_parameters.rope_theta is 6.0"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_parameters": {"rope_theta": 6.0}},
     "rope_scaling.rope_type = 'llama3': rope_parameters says otherwise"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type = 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.type = 'linear'"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
     "rope_parameters.full_attention = .*: RoPE for each kind of layer"),
])
def test_unsupported_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        parse_config(LLAMA | options, "config.json")


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
NO_COUNT = (0, -4, 4.0, 4.5, "4", True, [4], {}, 10**40)
NO_NUMBER = (0, -1.0, "1e-5", False, [1.0], {}, None, float("nan"), float("inf"), 10**400)


@pytest.mark.parametrize("value", NO_COUNT)
@pytest.mark.parametrize("key", SIZES)
def test_sizes_that_are_no_positive_whole_numbers_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: {key} = .*: must be a whole number") as e:
        parse_config(LLAMA | {key: value}, "config.json")
    assert "\n" not in str(e.value) and len(str(e.value)) < 200


@pytest.mark.parametrize("value", NO_NUMBER)
@pytest.mark.parametrize(("options", "key"), [
    (lambda v: {"rope_theta": v}, "rope_theta"),
    (lambda v: {"rms_norm_eps": v}, "rms_norm_eps"),
    (lambda v: {"rope_parameters": {"rope_theta": v}}, "rope_parameters.rope_theta"),
    *[(lambda v, k=k: {"rope_scaling": {"rope_type": "llama3", **LLAMA3, k: v}},
       f"rope_scaling.{k}") for k in ("factor", "low_freq_factor", "high_freq_factor")],
])
def test_numbers_that_are_not_positive_are_refused(options: Any, key: str, value: Any) -> None:
    # An object there would be RoPE for each kind of layer, which is refused as such.
    reason = "RoPE for each kind" if "." in key and value == {} else "must be a positive number"
    with pytest.raises(ConfigError, match=f"^config.json: {key} = .*: {reason}"):
        parse_config(LLAMA | options(value), "config.json")


@pytest.mark.parametrize(("options", "message"), [
    *[({key: None}, f"{key} = None: must be a whole number") for key in SIZES
      if key not in ("num_key_value_heads", "head_dim")],
    ({"num_key_value_heads": 3}, "num_attention_heads = 4: must be a multiple of"),
    ({"hidden_size": 18}, "hidden_size = 18: must be a multiple of num_attention_heads = 4"),
    ({"hidden_size": 2}, "hidden_size = 2: must be a multiple of num_attention_heads = 4"),
    ({"head_dim": 5}, "head_dim = 5: RoPE needs an even one"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no': must be true or false"),
    ({"model_type": ["llama"]}, r"model_type = \['llama'\]: choose llama"),
    ({"layer_types": 5}, "layer_types = 5: must be a list"),
    ({"rope_scaling": []}, r"rope_scaling = \[\]: must be an object or null"),
    ({"rope_scaling": [{"rope_type": "llama3"}]}, r"rope_scaling = .*: must be an object"),
    ({"rope_parameters": "llama3"}, "rope_parameters = 'llama3': must be an object"),
    ({"rope_scaling": {"rope_type": ["llama3"]}}, "rope_scaling.rope_type = .* not supported"),
    *[({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != lost} | {"rope_type": "llama3"}},
       f"rope_scaling.{lost} = None: must be a") for lost in LLAMA3],
    ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}},
     "rope_parameters.high_freq_factor = 1.0: must be larger than low_freq_factor = 1.0"),
])
def test_values_that_cannot_work_are_refused_in_one_line(
        options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: {message}") as error:
        parse_config(LLAMA | options, "config.json")
    assert "\n" not in str(error.value)


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
