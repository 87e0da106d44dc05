"""Checkpoint tensors by the names of Hugging Face's Llama, and the parameter tree made of them.

Shape letters as in structs.py; R = H / G query heads a key-value head, I = MLP width.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from specrl_jax.config import ConfigError
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.layers import layer_of
from specrl_jax.structs import Params

Shape = tuple[int, ...]

EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a checkpoint: their shapes, and a function that reads their data."""

    shapes: Mapping[str, Shape]
    read: Callable[[str], np.ndarray]  # name -> float32 array in Hugging Face's layout


def layer_name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}"


def layer_shapes(arch: Architecture) -> dict[str, Shape]:
    """Returns shapes by the name within a layer, [out, in] for matrices."""
    f, e, i = arch.hidden_size, arch.head_dim, arch.intermediate_size
    q, kv = arch.num_heads * e, arch.num_kv_heads * e
    shapes: dict[str, Shape] = {  # in the order in which random models draw them
        "input_layernorm.weight": (f,), "self_attn.q_proj.weight": (q, f),
        "self_attn.k_proj.weight": (kv, f), "self_attn.v_proj.weight": (kv, f),
        "self_attn.o_proj.weight": (f, q), "post_attention_layernorm.weight": (f,),
        "mlp.gate_proj.weight": (i, f), "mlp.up_proj.weight": (i, f),
        "mlp.down_proj.weight": (f, i)}
    if arch.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,),
                   "self_attn.v_proj.bias": (kv,)}
    if arch.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (e,), "self_attn.k_norm.weight": (e,)}
    return shapes


def tensor_shapes(arch: Architecture) -> dict[str, Shape]:
    """Returns the shape of every tensor of a checkpoint of `arch`, by name."""
    shapes: dict[str, Shape] = {EMBED: (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_layers):
        shapes |= {layer_name(layer, part): s for part, s in layer_shapes(arch).items()}
    shapes[FINAL_NORM] = (arch.hidden_size,)
    if not arch.tied:
        shapes[HEAD] = (arch.vocab_size, arch.hidden_size)
    return shapes


def check_tensors(arch: Architecture, shapes: Mapping[str, Shape], source: str) -> None:
    """Raises ConfigError unless a checkpoint's tensors are exactly those of `arch`.

    A tied head and RoPE's inverse frequencies are redundant and may be there.
    """
    if arch.num_layers > len(shapes):  # before anything is made for each layer
        raise ConfigError(f"{source}: {arch.num_layers} layers are asked for, but there are only "
                          f"{len(shapes)} tensors; the download is incomplete or the configuration "
                          "is of another model")
    wanted = tensor_shapes(arch)
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ConfigError(f"{source}: tensor {missing[0]} is missing ({len(missing)} of "
                          f"{len(wanted)} are); the download is incomplete or config.json is of "
                          "another model")
    for name, shape in wanted.items():
        if tuple(shapes[name]) != shape:
            raise ConfigError(f"{source}: tensor {name} has shape {tuple(shapes[name])}, but the "
                              f"configuration wants {shape}; take both from one model")
    unknown = [name for name in shapes if name not in wanted and name != HEAD
               and not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise ConfigError(f"{source}: unknown tensor {unknown[0]}; a {arch.family} model of this "
                          "configuration has no such tensor, so it would be computed wrongly; take "
                          "both from one model, of a supported kind")


def pack(arch: Architecture, tensors: Tensors) -> Params:
    """Returns the parameter tree of architecture.describe, float32 numpy arrays."""
    layers = [_pack_layer(arch, tensors, layer) for layer in range(arch.num_layers)]
    params = {"embed": tensors.read(EMBED), "final_norm": tensors.read(FINAL_NORM),
              "layers": layers}
    return params if arch.tied else params | {"head": tensors.read(HEAD)}


def _pack_layer(arch: Architecture, tensors: Tensors, layer: int) -> dict[str, np.ndarray]:
    g, r, e, f = arch.num_kv_heads, arch.group, arch.head_dim, arch.hidden_size

    def read(part: str) -> np.ndarray:
        return tensors.read(layer_name(layer, part))

    def grouped(kind: str, *rest: int) -> np.ndarray:
        parts = [read(f"self_attn.{x}_proj.{kind}").reshape(g, -1, e, *rest) for x in "qkv"]
        return np.concatenate(parts, axis=1)

    packed = {
        "attn_norm": read("input_layernorm.weight"),
        "qkv": grouped("weight", f),
        "o": read("self_attn.o_proj.weight").reshape(f, g, r, e),
        "mlp_norm": read("post_attention_layernorm.weight"),
        "gate_up": np.stack([read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")]),
        "down": read("mlp.down_proj.weight"),
    }
    if arch.qkv_bias:
        packed["qkv_bias"] = grouped("bias")
    if arch.qk_norm:
        packed |= {x: read(f"self_attn.{x}.weight") for x in ("q_norm", "k_norm")}
    return packed


def unpack(arch: Architecture, params: Params) -> Iterable[tuple[str, np.ndarray]]:
    """Yields (name, array) pairs, with one layer on the host at a time.

    It is the inverse of `pack`; layers may be stacked.
    """
    yield EMBED, np.asarray(params["embed"])
    for layer in range(arch.num_layers):
        for part, array in _unpack_layer(arch, layer_of(params["layers"], layer)).items():
            yield layer_name(layer, part), np.ascontiguousarray(array)
    yield FINAL_NORM, np.asarray(params["final_norm"])
    if not arch.tied:
        yield HEAD, np.asarray(params["head"])


def _unpack_layer(arch: Architecture, packed: Params) -> dict[str, np.ndarray]:
    packed = {name: np.asarray(x) for name, x in packed.items()}
    r, shapes = arch.group, layer_shapes(arch)
    parts = {
        "input_layernorm.weight": packed["attn_norm"],
        "self_attn.o_proj.weight": packed["o"],
        "post_attention_layernorm.weight": packed["mlp_norm"],
        "mlp.gate_proj.weight": packed["gate_up"][0],
        "mlp.up_proj.weight": packed["gate_up"][1],
        "mlp.down_proj.weight": packed["down"],
    }
    heads = {"q": slice(0, r), "k": slice(r, r + 1), "v": slice(r + 1, r + 2)}
    for x, which in heads.items():
        parts[f"self_attn.{x}_proj.weight"] = packed["qkv"][:, which]
        if arch.qkv_bias:
            parts[f"self_attn.{x}_proj.bias"] = packed["qkv_bias"][:, which]
    if arch.qk_norm:
        parts |= {f"self_attn.{x}.weight": packed[x] for x in ("q_norm", "k_norm")}
    return {name: array.reshape(shapes[name]) for name, array in parts.items()}
