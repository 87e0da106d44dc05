"""Model families: how checkpoints that the transformer can run differ from Llama's.

A family that differs in its configuration or in its tensors' names is one `Family`:

    MINE = Family("mine", "MineForCausalLM", read=lambda fields: {...})

`model.family=package.module:MINE` uses it, and so does `register_family("mine")(MINE)` for every
checkpoint whose model_type is mine.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from specrl_jax.config import Registry
from specrl_jax.model.fields import Fields

# Names in GGUF files -> names in a layer of Hugging Face's Llama.
GGUF_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj"}


@dataclasses.dataclass(frozen=True)
class Family:
    """What is particular about the checkpoints of a model family.

    Attributes:
      model_type: of config.json, and general.architecture of GGUF files.
      hf_class: the class in transformers, for exported models.
      architecture: fields of `Architecture` with the same value in all models of the family.
      read: returns further fields of `Architecture` from the fields of config.json.
      supported: option of config.json -> its values that are computed correctly; they replace those
        of hf_config.SUPPORTED.
      written: further fields of an exported config.json.
      max_position: transformers' default of max_position_embeddings.
      head_dim: transformers' default of head_dim; None is hidden_size / num_attention_heads.
      tensor_names: Llama's name -> the family's, both without "model.layers.N." and ".weight".
      gguf_names: GGUF's name -> Llama's, both within a layer.
      gguf_interleaved: GGUF files hold the rows of q and k in the order of interleaved RoPE.
    """

    model_type: str
    hf_class: str
    architecture: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Fields], Mapping[str, Any]] = lambda fields: {}
    supported: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_position: int = 2048
    head_dim: int | None = None
    tensor_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gguf_names: Mapping[str, str] = dataclasses.field(default_factory=lambda: GGUF_NAMES)
    gguf_interleaved: bool = False

    def to_checkpoint(self, name: str) -> str:
        """Returns the family's name of the tensor that Llama calls `name`."""
        return _rename(name, self.tensor_names)

    def from_checkpoint(self, name: str) -> str:
        """Returns Llama's name of the tensor that the family calls `name`."""
        return _rename(name, {own: llama for llama, own in self.tensor_names.items()})


def _rename(name: str, names: Mapping[str, str]) -> str:
    layer = re.match(r"model\.layers\.\d+\.|", name)
    above = layer[0] if layer else ""
    part, dot, kind = name.removeprefix(above).rpartition(".")
    return f"{above}{names.get(part, part)}{dot}{kind}"


FAMILIES: Registry[Family] = Registry("model.family", Family)

FAMILIES.register("llama")(Family("llama", "LlamaForCausalLM", gguf_interleaved=True))
FAMILIES.register("qwen2")(Family(
    "qwen2", "Qwen2ForCausalLM", architecture={"qkv_bias": True},
    written={"use_sliding_window": False}, max_position=32768))
FAMILIES.register("qwen3")(Family(
    "qwen3", "Qwen3ForCausalLM", architecture={"qk_norm": True},
    written={"use_sliding_window": False}, max_position=32768, head_dim=128))
