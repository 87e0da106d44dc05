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
])
def test_both_forms_of_rope(options: dict[str, Any]) -> None:
    arch = parse_config(LLAMA | options, "config.json")
    assert arch.rope_theta == 5.0
    assert arch.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize("options", [
    {"rope_theta": 5.0}, {"rope_theta": 5.0, "rope_scaling": None},
    {"rope_theta": 5.0, "rope_scaling": {"rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}])
def test_plain_rope(options: dict[str, Any]) -> None:
    arch = parse_config(LLAMA | options, "config.json")
    assert (arch.rope_theta, arch.rope_scaling) == (5.0, None)


@pytest.mark.parametrize(("options", "message"), [
    ({"model_type": "mamba"}, "model_type = 'mamba': choose llama"),
    ({"hidden_size": None}, "hidden_size = None: must be a number"),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"), ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "factor = None"),
])
def test_unsupported_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        parse_config(LLAMA | options, "config.json")


@pytest.mark.parametrize("name", ["llama", "llama3_rope", "qwen2", "qwen3"])
def test_written_config_parses_back(name: str) -> None:
    arch = parse_config(json.loads(str(np.load(GOLDENS / f"{name}.npz")["config"])), name)
    written = write_config(arch)
    assert parse_config(json.loads(json.dumps(written)), name) == arch
    for form in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        assert parse_config({k: v for k, v in written.items() if k not in form}, name) == arch
