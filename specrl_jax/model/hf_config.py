"""config.json of transformers 4 and 5: parsed to an Architecture, and written so both load it."""

import dataclasses

from specrl_jax.model.architecture import Architecture, RopeScaling
from specrl_jax.model.families import FAMILIES, Family
from specrl_jax.model.fields import REPAIR, Fields
from specrl_jax.structs import Json

# Options that change the computation, with the only values that are computed here.
SUPPORTED = {
    "hidden_act": ("silu", None), "attention_bias": (False, None), "mlp_bias": (False, None),
    "use_sliding_window": (False, None), "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    # Scales and caps of Granite, Cohere, Gemma, MiniCPM, Falcon-H1; layers without RoPE of SmolLM3.
    "logits_scaling": (1, None), "logit_scale": (1, None), "lm_head_multiplier": (1, None),
    "embedding_multiplier": (1, None), "residual_multiplier": (1, None), "scale_emb": (1, None),
    **dict.fromkeys(("attention_multiplier", "final_logit_softcapping", "attn_logit_softcapping",
                     "query_pre_attn_scalar", "scale_depth", "dim_model_base", "clip_qkv",
                     "no_rope_layers"), (None,))}

SCALING = {"original_max_position": "original_max_position_embeddings"}  # ours -> config.json's


def parse_config(config: Json, path: str, family: str = "") -> Architecture:
    """Returns the architecture that a config.json of transformers 4 or 5 describes. An empty
    `family` is the file's model_type; `path` is for errors.

    Raises:
      ConfigError: an unsupported model type or option, a missing key, or an impossible value.
    """
    fields, name = Fields(config, path), family or config.get("model_type")
    fields.check(bool(family) or isinstance(name, str) and name in FAMILIES, "model_type", name,
                 f"choose {', '.join(FAMILIES)}, or name a family in model.family")
    known = FAMILIES.resolve(str(name))
    _check_supported(fields, known)
    heads, kv_heads, head_dim = _heads(fields, known)
    rope = _rope(fields)
    arch = Architecture(
        vocab_size=fields.count("vocab_size"), hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"), num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, rope_scaling=_rope_scaling(rope), rope_theta=_rope_theta(fields, rope),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", False),
        max_position=fields.count("max_position_embeddings", known.max_position), family=str(name))
    return dataclasses.replace(arch, **known.architecture, **known.read(fields))


def write_config(arch: Architecture, dtype: str = "float32") -> Json:
    """Returns the config.json of `arch` with weights of `dtype`, for both transformers 4 and 5."""
    family, scaling = FAMILIES.resolve(arch.family), None
    if arch.rope_scaling is not None:
        scaling = {SCALING.get(name, name): value
                   for name, value in dataclasses.asdict(arch.rope_scaling).items()}
        scaling |= {"rope_type": "llama3"}
    return {
        "architectures": [family.hf_class], "model_type": family.model_type,
        "vocab_size": arch.vocab_size, "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size, "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads, "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim, "hidden_act": "silu", "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_position, "tie_word_embeddings": arch.tied,
        "rope_theta": arch.rope_theta, "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": arch.rope_theta, "rope_type": "default"}
        | (scaling or {}),
        "torch_dtype": dtype, "dtype": dtype, **family.written}


def _check_supported(fields: Fields, family: Family) -> None:
    """Raises ConfigError for an option whose value would be computed wrongly here."""
    for key, supported in {**SUPPORTED, **family.supported}.items():
        value = fields.values.get(key)
        fields.check(value in supported, key, value, "is not supported; choose a model without it")
    layers = fields.values.get("layer_types")
    fields.check(layers is None or isinstance(layers, list), "layer_types", layers,
                 f"must be a list or null; {REPAIR}")
    for kind in layers or ():
        fields.check(kind == "full_attention", "layer_types", kind,
                     "is not supported; choose a model without it")


def _heads(fields: Fields, family: Family) -> tuple[int, int, int]:
    """Returns (query heads, key-value heads, head size); null means transformers' defaults."""
    given = Fields({k: v for k, v in fields.values.items() if v is not None}, fields.path)
    heads, hidden = given.count("num_attention_heads"), given.count("hidden_size")
    kv_heads = given.count("num_key_value_heads", heads)
    fields.check(heads % kv_heads == 0, "num_attention_heads", heads,
                 f"must be a multiple of num_key_value_heads = {kv_heads}; {REPAIR}")
    derived = family.head_dim is None and "head_dim" not in given.values
    fields.check(not derived or hidden % heads == 0, "hidden_size", hidden,
                 f"must be a multiple of num_attention_heads = {heads}, or head_dim be given")
    head_dim = given.count("head_dim", family.head_dim or hidden // heads)
    fields.check(head_dim % 2 == 0, "head_dim", head_dim, f"RoPE needs an even one; {REPAIR}")
    return heads, kv_heads, head_dim


def _rope(fields: Fields) -> Fields:
    """Returns the section about RoPE: rope_parameters (transformers 5) or rope_scaling (4)."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    rope = new if new.values else old
    for key, value in rope.values.items():
        rope.check(not isinstance(value, dict), key, value,
                   "RoPE for each kind of layer is not supported; choose a model without it")
    old.check(not old.values or not new.values or _rope_scaling(old) == _rope_scaling(new),
              "rope_type", old.values.get("rope_type", old.values.get("type")),
              "differs from rope_parameters; transformers 4 and 5 read different ones; "
              + REPAIR)
    return rope


def _rope_theta(fields: Fields, rope: Fields) -> float:
    """Returns RoPE's base, from config.json itself or its section about RoPE."""
    if "rope_theta" not in rope.values:
        return fields.number("rope_theta", 10000.0)
    theta = rope.number("rope_theta")
    top = fields.number("rope_theta", theta)
    fields.check(top == theta, "rope_theta", top, f"{rope.above}rope_theta is {theta}, and "
                 f"transformers 4 and 5 differ in which they read; {REPAIR}")
    return theta


def _rope_scaling(rope: Fields) -> RopeScaling | None:
    key = "type" if "type" in rope.values and "rope_type" not in rope.values else "rope_type"
    kind = rope.values.get(key, "default")
    rope.check(kind in ("default", "llama3"), key, kind,
               "is not supported; choose a model with rope_type default or llama3")
    if kind == "default":
        return None
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    rope.check(low < high, "high_freq_factor", high,
               f"must be larger than low_freq_factor = {low}; {REPAIR}")
    return RopeScaling(rope.number("factor"), low, high,
                       rope.count("original_max_position_embeddings"))
