"""Shapes of Llama-like models (Llama 2/3, SmolLM2, Qwen2/2.5, Qwen3) and of their parameters.

Each parameter is described once; initialisation, shardings and restore derive from that. Weights
have the [out, in] orientation of checkpoints. Query heads are grouped by the key-value head that
they read: head h of a checkpoint is qkv[h // R, h % R] with R = H / G.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from specrl_jax.config import at_least, check
from specrl_jax.structs import Params


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (Llama 3.1 model card; `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Static shape of a model; `family` is a name in families.FAMILIES."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True
    max_position: int = 8192
    family: str = "llama"

    def __post_init__(self) -> None:
        at_least(1, vocab_size=self.vocab_size, hidden_size=self.hidden_size,
                 intermediate_size=self.intermediate_size, num_layers=self.num_layers,
                 num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        check(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads,
              f"must be a multiple of num_kv_heads = {self.num_kv_heads}")
        check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "RoPE needs an even head size")

    @property
    def group(self) -> int:
        """R, query heads per key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter: shape, logical axes (None is never sharded), standard deviation (0: ones)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float


def describe(arch: Architecture, stacked: bool = False) -> dict[str, Any]:
    """Returns the parameter tree with a `Param` at each leaf; for `stacked` see layers.py."""
    a, g, r, e, f = arch, arch.num_kv_heads, arch.group, arch.head_dim, arch.hidden_size
    std, out_std = 0.02, 0.02 / (2 * arch.num_layers) ** 0.5
    norm = Param((f,), ("embed",), 0)
    layer = {
        "attn_norm": norm,
        "qkv": Param((g, r + 2, e, f), ("kv_heads", None, None, "embed"), std),
        "o": Param((f, g, r, e), ("embed", "kv_heads", None, None), out_std),
        "mlp_norm": norm,
        "gate_up": Param((2, a.intermediate_size, f), (None, "mlp", "embed"), std),
        "down": Param((f, a.intermediate_size), ("embed", "mlp"), out_std)}
    if arch.qkv_bias:
        layer["qkv_bias"] = Param((g, r + 2, e), ("kv_heads", None, None), std)
    if arch.qk_norm:
        layer["q_norm"] = layer["k_norm"] = Param((e,), (None,), 0)
    table = Param((a.vocab_size, f), ("vocab", "embed"), std)
    tree = {"embed": table, "final_norm": norm, "layers": repeated(arch, layer, stacked)}
    return tree if arch.tied else tree | {"head": table}


def repeated(arch: Architecture, layer: dict[str, Any], stacked: bool) -> Any:
    """Returns the description of all layers, given that of one."""
    if not stacked:
        return [layer] * arch.num_layers
    return jax.tree.map(lambda p: Param((arch.num_layers, *p.shape), (None, *p.axes), p.std), layer,
                        is_leaf=is_param)


def is_param(x: Any) -> bool:
    return isinstance(x, Param)


def count(described: Any) -> int:
    """Returns the number of parameters of a tree with a `Param` at each leaf."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(described, is_leaf=is_param))


def initialize(arch: Architecture, seed: int) -> Params:
    """Returns random float32 parameters on the host, a pure function of (arch, seed)."""
    return draw(describe(arch), seed)


def draw(described: Any, seed: int) -> dict[str, Any]:
    """Returns random float32 host arrays for a tree with a `Param` at each leaf."""
    leaves, tree = jax.tree.flatten(described, is_leaf=is_param)
    rngs = np.random.default_rng(seed).spawn(len(leaves))
    return tree.unflatten([
        rng.standard_normal(param.shape, np.float32) * np.float32(param.std) if param.std
        else np.ones(param.shape, np.float32) for param, rng in zip(leaves, rngs, strict=True)])
