"""Writes GGUF files of small models, as llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specrl_jax.model.architecture import Architecture
from specrl_jax.model.families import GGUF_NAMES
from specrl_jax.model.gguf_file import ROPE_FREQS, TOP_NAMES
from specrl_jax.model.tensors import Tensors
from specrl_jax.model.tiny import CHATML, SPECIAL, byte_tokenizer
from specrl_jax.model.transformer import frequencies


def write_gguf(path: Path, arch: Architecture, tensors: Tensors,
               kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
               **metadata: Any) -> Path:
    """Matrices in quantisation `kind`, vectors in float32; `metadata` overrides, `.` as `__`."""
    writer = gguf.GGUFWriter(path, arch.family)
    for key, value in (model_keys(arch) | tokenizer_keys(arch) | {
            key.replace("__", "."): value for key, value in metadata.items()}).items():
        if key != "general.architecture" and value is not None:
            add(writer, key, value)
    for name in tensors.shapes:
        array = permute(arch, name, tensors.read(name))
        quantised = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(array, quantised)
        writer.add_tensor(gguf_name(name), data, raw_dtype=quantised)
    if arch.rope_scaling is not None:
        writer.add_tensor(ROPE_FREQS, rope_factors(arch))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    methods = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32,
               float: writer.add_float32, list: writer.add_array}
    methods[type(value)](key, value)


def model_keys(arch: Architecture) -> dict[str, Any]:
    return {f"{arch.family}.{key}": value for key, value in {
        "block_count": arch.num_layers, "context_length": arch.max_position,
        "embedding_length": arch.hidden_size, "feed_forward_length": arch.intermediate_size,
        "attention.head_count": arch.num_heads, "attention.head_count_kv": arch.num_kv_heads,
        "attention.key_length": arch.head_dim, "attention.value_length": arch.head_dim,
        "attention.layer_norm_rms_epsilon": arch.norm_eps, "rope.freq_base": arch.rope_theta,
        "rope.dimension_count": arch.head_dim}.items()}


def tokenizer_keys(arch: Architecture) -> dict[str, Any]:
    """Bytes, special tokens, one merge, and padding up to the embedding's rows."""
    backend = byte_tokenizer().backend
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())] + ["he"]
    unused = [f"[PAD{i}]" for i in range(len(tokens), arch.vocab_size)]
    kinds = [1] * 256 + [3] * len(SPECIAL) + [1] + [5] * len(unused)
    return {f"tokenizer.{key}": value for key, value in {
        "ggml.model": "gpt2", "ggml.pre": "qwen2", "ggml.tokens": tokens + unused,
        "ggml.token_type": kinds, "ggml.merges": ["h e"], "ggml.bos_token_id": 256,
        "ggml.eos_token_id": 258, "ggml.padding_token_id": 256, "chat_template": CHATML}.items()}


def permute(arch: Architecture, name: str, array: np.ndarray) -> np.ndarray:
    """Rotate-half rows to interleaved ones, for the llama family's q and k only."""
    heads = {"q_proj": arch.num_heads, "k_proj": arch.num_kv_heads}.get(name.split(".")[-2])
    if heads is None or arch.family != "llama":
        return array
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def gguf_name(name: str) -> str:
    top = {hf: own for own, hf in TOP_NAMES.items()}
    if name in top:
        return top[name]
    _, _, layer, part = name.split(".", 3)
    part, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{ {hf: own for own, hf in GGUF_NAMES.items()}[part] }.{kind}"


def rope_factors(arch: Architecture) -> np.ndarray:
    """What Llama 3's scaling divides each frequency by, f32[E/2]."""
    plain = arch.rope_theta ** (-np.arange(0, arch.head_dim, 2) / arch.head_dim)
    return (plain / frequencies(arch)).astype(np.float32)
