"""The actor as pure functions over a parameter tree.

Activations are feature-major, [F, ...tokens]. With weights in [out, in] orientation a product is
then `w @ x` without a transpose: a CPU runs that faster than `x @ w` from 1 to 128 tokens
(experiments/LOG.md), and keys have the layout of the cache, [G, E, token].
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint
from specrl_kernels import rms_norm as kernels
from specrl_kernels.dispatch import automatic_axes, traced_for
from specrl_kernels.narrow_matmul import narrow_matmul

from specrl_jax import sharding
from specrl_jax.model import layers
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.attention import Attend, segment_attention
from specrl_jax.model.layers import Index
from specrl_jax.structs import Array, Cache, Params

T = TypeVar("T")
LayerKV: TypeAlias = list[tuple[Array, Array]] | tuple[Array, Array]
"""(k, v) of each layer; stacked along a leading axis where layers are."""

# Of [G, R + 2, E, B, T] on a TPU: else a small E lies in lanes, of which RoPE then fills a quarter.
# With 128 features it costs collectives and copies (experiments/LOG.md).
TOKENS_IN_LANES = Layout((0, 1, 3, 2, 4))


class Packing(struct.PyTreeNode):
    """The tree nodes that a forward runs over; entries past the live ones repeat node 0, row 0."""

    row: Array  # i32[W]
    node: Array  # i32[W]
    place: Array  # i32[B, n] index in W; 0 for dead nodes; where W = B n, all in order
    parent: Array  # i32[B, n]

    @property
    def in_order(self) -> bool:
        """Whether all nodes of all rows are packed, in order."""
        return self.place.size == self.row.size

    def by_row(self, a: Array) -> Array:
        """[B, n, ...] of [W, ...]."""
        if self.in_order:
            return a.reshape(*self.place.shape, *a.shape[1:])
        return a[self.place]


def frequencies(arch: Architecture) -> np.ndarray:
    """Returns the angle per position of each pair of features, f32[E/2], scaled as in Llama 3."""
    inverse = 1.0 / arch.rope_theta ** (np.arange(0, arch.head_dim, 2) / arch.head_dim)
    scaling = arch.rope_scaling
    if scaling is None:
        return inverse.astype(np.float32)
    turns = scaling.original_max_position * inverse / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (inverse * (smooth + (1 - smooth) / scaling.factor)).astype(np.float32)


def rotations(arch: Architecture, position: Array) -> tuple[Array, Array]:
    """Returns cos and sin, f32[E/2, ...] each, of the RoPE angles at positions i32[...]."""
    shape = (-1,) + (1,) * position.ndim
    angle = frequencies(arch).reshape(shape) * position[None].astype(jnp.float32)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Applies RoPE to x f[..., E, *tokens], with `rotation` f32[E/2, *tokens] twice."""
    cos, sin = (jnp.expand_dims(r, tuple(range(x.ndim - r.ndim))) for r in rotation)
    return _turn(x, cos, sin, x.ndim - rotation[0].ndim)


def _turn(x: Array, cos: Array, sin: Array, axis: int) -> Array:
    """Rotates the halves of `axis` by angles that broadcast to them."""
    first, second = jnp.split(x, 2, axis)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis).astype(x.dtype)


def rms_norm(x: Array, weight: Array, eps: float, axis: int = 0, decode: bool = False) -> Array:
    """Returns the root-mean-square norm over `axis`, in float32; `decode`: see `project`."""
    if decode:
        first = jnp.moveaxis(x, axis, 0)
        normed = kernels.rms_norm(first.reshape(len(first), -1), weight, eps=eps)
        return jnp.moveaxis(normed.reshape(first.shape), 0, axis)
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis, keepdims=True) + eps)
    shape = [1] * x.ndim
    shape[axis] = -1
    return (scaled * weight.reshape(shape)).astype(x.dtype)


def project(weight: Array, x: Array, axes: int = 1, decode: bool = False, dtype: Any = None
            ) -> Array:
    """Returns weight [..., in] times x [in, ...], contracting the last `axes` of weight.

    Args:
      decode: x has few tokens and is not differentiated; a CPU has a kernel for that case.
      dtype: of the result; None keeps the dtype of x.
    """
    cpu = traced_for().platform == "cpu"
    if not decode or not cpu or automatic_axes()[1] > 1:  # a split weight cannot be reshaped
        if cpu and dtype not in (None, x.dtype):
            weight, x = weight.astype(dtype), x.astype(dtype)  # it lacks some mixed products
        return jnp.tensordot(weight, x, axes, preferred_element_type=dtype)
    out, tokens = weight.shape[: weight.ndim - axes], x.shape[axes:]
    inner = math.prod(x.shape[:axes])
    y = narrow_matmul(weight.reshape(-1, inner), x.reshape(inner, -1))
    return y.astype(dtype or x.dtype).reshape(out + tokens)


def adapted(layer: Params, name: str, x: Array, y: Array) -> Array:
    """Returns the projection y [out, ...] of x [in, ...] plus that of the layer's low-rank adapter
    called `name`, if it has one; see model/lora.py."""
    adapter = layer.get("lora", {}).get(name)
    if adapter is None:
        return y
    return y + project(adapter["b"], project(adapter["a"], x, adapter["a"].ndim - 1))


def attention_inputs(arch: Architecture, layer: Params, x: Array, rotation: tuple[Array, Array],
                     decode: bool = False) -> tuple[Array, Array, Array]:
    """Returns q [G, R, E, ...], k and v [G, E, ...] of one layer for x [F, ...]."""
    normed = rms_norm(x, layer["attn_norm"], arch.norm_eps, decode=decode)
    qkv = project(layer["qkv"], normed, decode=decode)
    if arch.qkv_bias:
        bias = layer["qkv_bias"]
        qkv = qkv + bias.reshape(bias.shape + (1,) * (x.ndim - 1))
    if decode and "lora" not in layer and traced_for().platform == "tpu":
        return _split_in_lanes(arch, layer, qkv, rotation)
    if not decode and arch.head_dim < 128 and traced_for().platform == "tpu":
        qkv = with_layout_constraint(qkv, TOKENS_IN_LANES)
    q, k, v = qkv[:, : arch.group], qkv[:, arch.group], qkv[:, arch.group + 1]
    q, k, v = (adapted(layer, f"{name}_proj", normed, y)
               for name, y in zip("qkv", (q, k, v), strict=True))
    if arch.qk_norm:
        q = rms_norm(q, layer["q_norm"], arch.norm_eps, 2, decode)
        k = rms_norm(k, layer["k_norm"], arch.norm_eps, 1, decode)
    return rotate(q, rotation), rotate(k, rotation), v


def _split_in_lanes(arch: Architecture, layer: Params, qkv: Array, rotation: tuple[Array, Array]
                    ) -> tuple[Array, Array, Array]:
    """Returns what `attention_inputs` does from qkv [G, R + 2, E, W], transposed at once to
    features in lanes, which a TPU's attention reads; else XLA transposes q, k and v one by one."""
    heads = qkv.transpose(3, 0, 1, 2)
    q, k, v = heads[:, :, : arch.group], heads[:, :, arch.group, None], heads[:, :, arch.group + 1]
    if arch.qk_norm:
        q = rms_norm(q, layer["q_norm"], arch.norm_eps, 3, decode=True)
        k = rms_norm(k, layer["k_norm"], arch.norm_eps, 3, decode=True)
    cos, sin = (a.T[:, None, None] for a in rotation)
    turned = _turn(jnp.concatenate([q, k], 2), cos, sin, 3)
    q, k = turned[:, :, : arch.group], turned[:, :, arch.group]
    return q.transpose(1, 2, 3, 0), k.transpose(1, 2, 0), v.transpose(1, 2, 0)


def feed_forward(arch: Architecture, layer: Params, x: Array, decode: bool = False) -> Array:
    normed = rms_norm(x, layer["mlp_norm"], arch.norm_eps, decode=decode)
    gate_up = project(layer["gate_up"], normed, decode=decode)
    gate = adapted(layer, "gate_proj", normed, gate_up[0])
    inner = jax.nn.silu(gate) * adapted(layer, "up_proj", normed, gate_up[1])
    return adapted(layer, "down_proj", inner, project(layer["down"], inner, decode=decode))


def block(arch: Architecture, layer: Params, index: Index, x: Array, rotation: tuple[Array, Array],
          attend: Attend, decode: bool = False) -> tuple[Array, tuple[Array, Array]]:
    """Runs one layer. `attend(index, q, k, v)` returns [G, R, E, ...]; `decode`: see `project`."""
    q, k, v = attention_inputs(arch, layer, x, rotation, decode)
    heads = attend(index, q, k, v)
    x = x + adapted(layer, "o_proj", heads, project(layer["o"], heads, 3, decode))
    return x + feed_forward(arch, layer, x, decode), (k, v)


def head(arch: Architecture, params: Params) -> Array:
    """Returns the output head [V, F]."""
    return params["embed"] if arch.tied else params["head"]


def logits(arch: Architecture, params: Params, hidden: Array, decode: bool = False) -> Array:
    """Returns logits f32[V, ...] of final normalised hidden states [F, ...]."""
    return project(head(arch, params), hidden, decode=decode, dtype=jnp.float32)


def embed(params: Params, tokens: Array) -> Array:
    """Returns the embeddings [F, ...] of tokens i32[...]."""
    return jnp.moveaxis(params["embed"][tokens], -1, 0)


def tree_forward(arch: Architecture, params: Params, cache: Cache, tokens: Array, position: Array,
                 packing: Packing, implementation: str | None = None, taps: tuple[int, ...] = ()
                 ) -> tuple[Array, LayerKV, Array | None]:
    """Runs the model on packed tree nodes; reads the cache and does not change it.

    Args:
      tokens, position: i32[W].
      taps: layers whose outputs are returned, 0-based.

    Returns:
      final normalised hidden states [F, W]; per layer the new (k, v), each [G, E, W], as
      `layers.run` returns them; and the residual stream after each of `taps`,
      [len(taps) * F, W], None if there are none.
    """
    # The barrier keeps XLA from computing the angles anew in every layer.
    rotation = jax.lax.optimization_barrier(rotations(arch, position))
    attend = cache.kv.reader(arch, packing, cache.length, implementation)

    def run(layer: Params, index: Index, x: Array) -> tuple[Array, tuple[Array, Array]]:
        return block(arch, layer, index, x, rotation, attend, decode=True)

    x, fresh, tapped = layers.run(params["layers"], run, embed(params, tokens), taps)
    return rms_norm(x, params["final_norm"], arch.norm_eps, decode=True), fresh, tapped


def in_dtype(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Returns the parameters with the matrices of all layers in `dtype`.

    Norms, the embedding and the head keep their dtype: their gradients add up over tokens.
    """
    def cast(path: jax.tree_util.KeyPath, a: Array) -> Array:
        return a if "norm" in jax.tree_util.keystr(path) else a.astype(dtype)

    return params | {"layers": jax.tree_util.tree_map_with_path(cast, params["layers"])}


def rematerialize(run: Callable[..., T], remat: str) -> Callable[..., T]:
    """Returns `run`, whose backward pass recomputes what `remat` does not keep: nothing if it is
    "none", all if it is "full", else what that policy of jax.checkpoint_policies drops."""
    if remat == "none":
        return run
    policy = None if remat == "full" else getattr(jax.checkpoint_policies, remat)
    return jax.checkpoint(run, policy=policy)


def hidden_states(arch: Architecture, params: Params, tokens: Array, position: Array,
                  segment: Array, prefix: Array | None = None, remat: str = "none",
                  taps: tuple[int, ...] = ()) -> tuple[Array, LayerKV, Array | None]:
    """Runs the model on whole rows of sequences. The layers' dtype is that of activations.

    Args:
      tokens, position, segment, prefix: i32[B, T]; see `segment_attention`.
      remat: what a backward pass recomputes of each layer; see `rematerialize`.
      taps: layers whose outputs are returned, 0-based.

    Returns:
      as `tree_forward`, with [B, T] in place of [W].
    """
    rotation = rotations(arch, position)
    attend = segment_attention(position, segment, prefix)

    def block_of(layer: Params, x: Array) -> tuple[Array, tuple[Array, Array]]:
        return block(arch, layer, 0, x, rotation, attend)

    x = embed(params, tokens).astype(layers.layer_of(params["layers"], 0)["qkv"].dtype)
    x = sharding.split_rows(x, 1)
    one = rematerialize(block_of, remat)
    x, cached, tapped = layers.run(
        params["layers"], lambda layer, _, x: one(layer, x), x, taps)
    return rms_norm(x, params["final_norm"], arch.norm_eps), cached, tapped


def right_padded(shape: tuple[int, ...], length: Array) -> tuple[Array, Array]:
    """Returns position and segment, i32[B, T] each, for one sequence a row of `length` i32[B]."""
    position = jnp.broadcast_to(jnp.arange(shape[1])[None], shape)
    return position, jnp.where(position < length[:, None], 0, -1)


def forward(arch: Architecture, params: Params, tokens: Array, length: Array) -> Array:
    """Returns the logits f32[B, T, V] of right-padded rows i32[B, T]."""
    hidden, _, _ = hidden_states(arch, params, tokens, *right_padded(tokens.shape, length))
    return jnp.moveaxis(logits(arch, params, hidden), 0, -1)
