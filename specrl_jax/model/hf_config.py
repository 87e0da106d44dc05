"""config.json of transformers 4 and 5: parsed to an Architecture, and written so both load it."""

from collections.abc import Mapping
from typing import Any

from specrl_jax.config import ConfigError
from specrl_jax.model.architecture import Architecture, RopeScaling

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MAX_POSITION = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}  # transformers' defaults

# Options that change the computation, with the only values that are computed here.
FIXED = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}


def parse_config(config: Mapping[str, Any], path: str) -> Architecture:
    """The architecture that a config.json describes, in the form of transformers 4 or 5.

    Args:
      config: the file's content.
      path: the file's name, for errors.

    Raises:
      ConfigError: an unsupported model type or option, or a missing key.
    """
    family = config.get("model_type")
    _refuse_unless(family in CLASSES, path, "model_type", family, f"choose {', '.join(CLASSES)}")
    for key, supported in FIXED.items():
        _refuse_unless(config.get(key) in supported, path, key, config.get(key),
                       "is not supported; choose a model without it")
    sliding = "sliding_attention" in (config.get("layer_types") or ())
    _refuse_unless(not sliding, path, "layer_types", "sliding_attention", "is not supported; "
                   "choose a model without it")
    heads, hidden = _number(config, "num_attention_heads", path), _number(config, "hidden_size",
                                                                          path)
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return Architecture(
        vocab_size=_number(config, "vocab_size", path),
        hidden_size=hidden,
        intermediate_size=_number(config, "intermediate_size", path),
        num_layers=_number(config, "num_hidden_layers", path),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_scaling=_rope_scaling(rope, path),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        max_position=config.get("max_position_embeddings", MAX_POSITION[family]),
        family=family,
    )


def write_config(arch: Architecture) -> dict[str, Any]:
    """The config.json of `arch` with float32 weights, for transformers 4 and 5 alike."""
    scaling = _scaling_dict(arch.rope_scaling)
    config = {
        "architectures": [CLASSES[arch.family]],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_position,
        "tie_word_embeddings": arch.tied,
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": arch.rope_theta,
                            **(scaling or {"rope_type": "default"})},
        "torch_dtype": "float32",
        "dtype": "float32",
    }
    return config if arch.family == "llama" else config | {"use_sliding_window": False}


def _rope_scaling(rope: Mapping[str, Any], path: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    _refuse_unless(kind in ("default", "llama3"), path, "rope_type", kind,
                   "is not supported; choose a model with rope_type default or llama3")
    if kind == "default":
        return None
    return RopeScaling(
        factor=float(_number(rope, "factor", path)),
        low_freq_factor=float(_number(rope, "low_freq_factor", path)),
        high_freq_factor=float(_number(rope, "high_freq_factor", path)),
        original_max_position=int(_number(rope, "original_max_position_embeddings", path)),
    )


def _scaling_dict(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"rope_type": "llama3", "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position}


def _number(config: Mapping[str, Any], key: str, path: str) -> Any:
    value = config.get(key)
    _refuse_unless(isinstance(value, int | float), path, key, value, "must be a number; fetch the "
                   "file again")
    return value


def _refuse_unless(ok: bool, path: str, key: str, value: Any, way_out: str) -> None:
    if not ok:
        raise ConfigError(f"{path}: {key} = {value!r}: {way_out}")
