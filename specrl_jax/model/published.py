"""Shapes of published checkpoints, so that programs can be compiled without their weights.

`random:qwen2_5_7b` is a model of these shapes with random weights and a byte tokenizer.
"""

import dataclasses
import re
import types
import zlib

import numpy as np

from specrl_jax.config import Config
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.tensors import EMBED, HEAD, Part, Tensors, slices, tensor_shapes

# From config.json of Qwen2.5-*-Instruct and Qwen3-8B on the Hugging Face hub. The larger Qwen2.5
# pad their vocabulary further.
_QWEN2_5 = Architecture(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_dim=64, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tied=True,
    max_position=32768, family="qwen2")
_LARGE = dataclasses.replace(_QWEN2_5, head_dim=128, vocab_size=152064, tied=False)
PUBLISHED = types.MappingProxyType({
    "qwen2_5_0_5b": _QWEN2_5,
    "qwen2_5_1_5b": dataclasses.replace(
        _QWEN2_5, hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12,
        head_dim=128),
    "qwen2_5_3b": dataclasses.replace(
        _QWEN2_5, hidden_size=2048, intermediate_size=11008, num_layers=36, num_heads=16,
        head_dim=128),
    "qwen2_5_7b": dataclasses.replace(
        _LARGE, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28,
        num_kv_heads=4),
    "qwen2_5_14b": dataclasses.replace(
        _LARGE, hidden_size=5120, intermediate_size=13824, num_layers=48, num_heads=40,
        num_kv_heads=8),
    "qwen3_8b": Architecture(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
        num_kv_heads=8, head_dim=128, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied=False,
        max_position=40960, family="qwen3"),
})


def without_weights(config: Config) -> Config:
    """Returns `config` with random weights of the same shapes if its model is one of the above.

    `Qwen/Qwen2.5-7B-Instruct`, on the hub or a directory of that name, is `qwen2_5_7b`.
    """
    stem = config.model.path.rstrip("/").rpartition("/")[2].removesuffix("-Instruct")
    name = re.sub(r"\W", "_", stem).lower()
    if name not in PUBLISHED:
        return config
    model = dataclasses.replace(config.model, path=f"random:{name}")
    return dataclasses.replace(config, model=model)


def random_tensors(arch: Architecture) -> Tensors:
    """Returns tensors with a trained model's variance, each drawn when a part of it is read."""
    shapes = tensor_shapes(arch)

    def read(name: str, part: Part) -> np.ndarray:
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(
            shapes[name], np.float32)
        if noise.ndim == 1:
            return (0.1 * noise + ("bias" not in name))[slices(part)]
        noise *= (2 if name in (EMBED, HEAD) else 1) / noise.shape[1] ** 0.5
        return noise[slices(part)]

    return Tensors(shapes, read)
