"""Low-rank adapters, trained instead of the layers' matrices.

LoRA, arXiv:2106.09685, section 4.1: a frozen W [out, in] acts as W + scale B A, with A [rank, in]
and B [out, rank]. A is random at first and B zero, so that training starts at the frozen weights.
Adapters are a tree {"layers": ...} whose layers, a list or stacked, hold {"a": A, "b": B} by the
names of projections; input and output axes are those of the parameters in architecture.describe.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.config import LearnerConfig, check
from specrl_jax.model import architecture, layers
from specrl_jax.model.architecture import Architecture, Param, is_param
from specrl_jax.structs import Params, PyTree

# The position of a projection: a parameter of a layer, and its part as a function of R.
PARTS = {"q_proj": ("qkv", lambda r: np.s_[:, :r]), "k_proj": ("qkv", lambda r: np.s_[:, r]),
         "v_proj": ("qkv", lambda r: np.s_[:, r + 1]), "o_proj": ("o", lambda r: ...),
         "gate_proj": ("gate_up", lambda r: 0), "up_proj": ("gate_up", lambda r: 1),
         "down_proj": ("down", lambda r: ...)}


def describe(arch: Architecture, options: LearnerConfig, stacked: bool = False) -> Params:
    """Returns the tree of adapters with a `Param` at each leaf.

    Raises:
      ConfigError: the rank is above the width of a projection.
    """
    layer, rank = {}, options.lora_rank
    for name in sorted(options.lora_targets):
        within, out = _axes(arch, name)
        width, most = (math.prod(size for size, _ in axes) for axes in (within, out))
        check(rank <= min(width, most), "learner.lora_rank", rank,
              f"must be at most {min(width, most)}, the width of {name}; lower it, or leave that "
              "out of learner.lora_targets")
        layer[name] = {"a": _param([(rank, None), *within], (3 * width) ** -0.5),
                       "b": _param([*out, (rank, None)], 0)}
    return {"layers": architecture.repeated(arch, layer, stacked)}


def _param(axes: list[tuple[int, str | None]], std: float) -> Param:
    shape, names = zip(*axes, strict=True)
    return Param(shape, names, std)


def _axes(arch: Architecture, name: str) -> tuple[list[tuple[int, str | None]], ...]:
    """Returns size and logical axis of each input and of each output axis of a projection."""
    f, g, i = (arch.hidden_size, "embed"), (arch.num_kv_heads, "kv_heads"), (
        arch.intermediate_size, "mlp")
    r, e = (arch.group, None), (arch.head_dim, None)
    return {"q_proj": ([f], [g, r, e]), "k_proj": ([f], [g, e]), "v_proj": ([f], [g, e]),
            "o_proj": ([g, r, e], [f]), "gate_proj": ([f], [i]), "up_proj": ([f], [i]),
            "down_proj": ([i], [f])}[name]


def trained(arch: Architecture, options: LearnerConfig, stacked: bool) -> Params:
    """Returns the description of what updates change: adapters, or without any all weights."""
    if options.lora_rank:
        return describe(arch, options, stacked)
    return architecture.describe(arch, stacked)


def initialize(arch: Architecture, options: LearnerConfig, seed: int, stacked: bool) -> Params:
    """Returns float32 host arrays: A with the variance of peft's, B zero. They are a function of
    the arguments but for `stacked`, which only arranges them."""
    described = describe(arch, options)
    drawn = architecture.draw(described, seed)
    zeroed = jax.tree.map(lambda p, a: a if p.std else np.zeros_like(a), described, drawn,
                          is_leaf=is_param)
    return layers.arrange(zeroed, stacked)


def freeze(params: Params, dtype: Any) -> Params:
    """Returns frozen weights: matrices in `dtype`, norms unchanged.

    The learner's products run in `dtype`, so no result differs.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, a: a if "norm" in jax.tree_util.keystr(path) else a.astype(dtype), params)


def attach(options: LearnerConfig, base: Params | None, params: Params) -> Params:
    """Returns weights for a forward pass with adapters added to the frozen matrices.

    Args:
      base: frozen weights; None if `params` are not adapters but all weights, which are returned.
    """
    if base is None:
        return params
    scaled = jax.tree_util.tree_map_with_path(
        lambda path, a: a * options.lora_scale if path[-1].key == "b" else a, params)
    adapters = {"lora": scaled["layers"]} if layers.is_stacked(params) else [
        {"lora": layer} for layer in scaled["layers"]]
    return overlay(base, {"layers": adapters})


def overlay(params: Params, changed: Params) -> Params:
    """Returns `params` with other values for those entries of layers that `changed` holds."""
    old, new = params["layers"], changed["layers"]
    if layers.is_stacked(params):
        return params | {"layers": old | new}
    return params | {"layers": [a | b for a, b in zip(old, new, strict=True)]}


def merged_part(options: LearnerConfig, params: PyTree) -> PyTree:
    """Returns those entries of layers, arrays or descriptions, that merging changes."""
    names = {PARTS[target][0] for target in options.lora_targets}

    def select(layer: Params) -> Params:
        return {name: value for name, value in layer.items() if name in names}

    old = params["layers"]
    return {"layers": select(old) if layers.is_stacked(params) else [select(x) for x in old]}


def merge(options: LearnerConfig, dtype: Any, base: Params, adapters: Params) -> Params:
    """Returns W + scale B A, computed in float32, for those entries of layers that it changes.

    `overlay` puts them into a tree of all weights. Layers may be stacked.
    """
    def one(layer: Params, adapters: Params) -> Params:
        merged, group = {}, layer["qkv"].shape[1] - 2
        for target, adapter in adapters.items():
            name, part = PARTS[target]
            product = jnp.tensordot(adapter["b"], adapter["a"], 1, precision="highest")
            whole = jnp.asarray(merged.get(name, layer[name]), jnp.float32)
            merged[name] = whole.at[part(group)].add(options.lora_scale * product)
        return {name: w.astype(dtype) for name, w in merged.items()}

    old, new = base["layers"], adapters["layers"]
    if layers.is_stacked(base):  # a layer at a time: float32 copies of all would need much memory
        wanted = merged_part(options, base)["layers"] | {"qkv": old["qkv"]}
        return {"layers": jax.lax.map(lambda pair: one(*pair), (wanted, new))}
    return {"layers": [one(*pair) for pair in zip(old, new, strict=True)]}
