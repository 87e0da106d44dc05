"""Writes any model that this project loads as a float32 GGUF file, without a tokenizer."""

from pathlib import Path

import gguf
import numpy as np

from specrl_jax.model.architecture import Architecture
from specrl_jax.model.families import GGUF_NAMES
from specrl_jax.model.gguf_file import ROPE_FREQS, TOP_NAMES
from specrl_jax.model.transformer import frequencies
from specrl_jax.model.weights import Source

OWN_TOP = {theirs: own for own, theirs in TOP_NAMES.items()}
OWN_PART = {theirs: own for own, theirs in GGUF_NAMES.items()}


def write_float32(path: Path, source: Source) -> Path:
    """Writes all tensors of `source` as float32 unless `path` exists; returns `path`."""
    if path.exists():
        return path
    arch, partial = source.arch, path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, arch.family)
    _add_metadata(writer, arch)
    for name in source.tensors.shapes:
        if arch.tied and name == TOP_NAMES["output.weight"]:
            continue
        writer.add_tensor(own_name(name), permuted(arch, name, source.tensors.read(name)))
    if arch.rope_scaling is not None:
        writer.add_tensor(ROPE_FREQS, _rope_factors(arch))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(path)


def _add_metadata(writer: gguf.GGUFWriter, arch: Architecture) -> None:
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(arch.vocab_size)
    writer.add_block_count(arch.num_layers)
    writer.add_context_length(arch.max_position)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_feed_forward_length(arch.intermediate_size)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    writer.add_rope_freq_base(arch.rope_theta)
    writer.add_rope_dimension_count(arch.head_dim)


def own_name(name: str) -> str:
    """Returns the GGUF name of a tensor with a Hugging Face name."""
    if name in OWN_TOP:
        return OWN_TOP[name]
    _, _, layer, part = name.split(".", 3)
    part, _, kind = part.rpartition(".")
    return f"blk.{layer}.{OWN_PART[part]}.{kind}"


def permuted(arch: Architecture, name: str, array: np.ndarray) -> np.ndarray:
    """Undoes gguf_file.unpermute, which changes q and k of the llama family only."""
    kind = name.split(".")[-2]
    heads = {"q_proj": arch.num_heads, "k_proj": arch.num_kv_heads}.get(kind)
    if heads is None or arch.family != "llama":
        return np.ascontiguousarray(array, np.float32)
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape), np.float32)


def _rope_factors(arch: Architecture) -> np.ndarray:
    """Returns the factors by which Llama 3's scaling divides the frequencies, f32[E/2]."""
    plain = arch.rope_theta ** (-np.arange(0, arch.head_dim, 2) / arch.head_dim)
    return (plain / frequencies(arch)).astype(np.float32)
