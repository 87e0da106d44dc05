"""JAX's flash-attention kernels for TPUs and GPUs, on rows that hold several sequences.

They know that tokens of one segment see each other, and no prefix that segments share.
"""

import functools
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from specrl_jax.sharding import ROWS, TENSOR
from specrl_jax.structs import Array

BLOCKS = (512, 256, 128)  # queries or keys at once; rows are padded to a multiple of the last

Kernel = Callable[..., Array]  # (q, k, v, segment)


def flash_attention(platform: str, segment: Array, interpret: bool = False
                    ) -> Callable[..., Array]:
    """Returns attention (index, q, k, v) -> [G, R, E, B, T] by the kernel of a platform.

    Tokens of a segment are in the order of their positions. In a mesh each device runs the kernel
    on its own rows and heads.

    Args:
      platform: "tpu" (splash attention) or "gpu" (Pallas through Triton).
      segment: i32[B, T]; -1 pads.
      interpret: run the kernel without its platform.
    """
    kernel = {"tpu": _splash, "gpu": _triton}[platform]
    spare = -segment.shape[1] % BLOCKS[-1]
    padded = jnp.pad(segment, ((0, 0), (0, spare)), constant_values=-1)

    def attend(index: Any, q: Array, k: Array, v: Array) -> Array:
        del index
        q, k, v = (jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, spare)]) for a in (q, k, v))
        out = _on_each_device(functools.partial(kernel, interpret=interpret), q, k, v, padded)
        return out[..., : segment.shape[1]]

    return attend


def _on_each_device(kernel: Kernel, q: Array, k: Array, v: Array, segment: Array) -> Array:
    """Runs a kernel, which the partitioner cannot divide, on each device's rows and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    left: Set[str] = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
    if not left:
        return kernel(q, k, v, segment)
    axes = tuple(axis for axis in ROWS if axis in left)
    shards = int(np.prod([mesh.shape[axis] for axis in axes]))
    rows = axes if axes and segment.shape[0] % shards == 0 else None
    heads = TENSOR if TENSOR in left and len(k) % mesh.shape[TENSOR] == 0 else None
    split = jax.shard_map(
        kernel, in_specs=(P(heads, None, None, rows), *(P(heads, None, rows),) * 2, P(rows)),
        out_specs=P(heads, None, None, rows), axis_names=left, check_vma=False)
    return split(q, k, v, segment)


def _block(total: int) -> int:
    return next(block for block in BLOCKS if total % block == 0)


def _splash(q: Array, k: Array, v: Array, segment: Array, *, interpret: bool) -> Array:
    """TPU: query heads share the keys and values of their group, which are not repeated."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    g, r, e, _, total = q.shape
    size = _block(total)
    causal = masks.MultiHeadMask([masks.CausalMask((total, total))] * (g * r))
    kernel = splash.make_splash_mha(
        causal, head_shards=1, q_seq_shards=1, interpret=interpret,
        block_sizes=splash.BlockSizes(
            block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size,
            block_kv_dq=size))
    scaled = (q * e**-0.5).astype(q.dtype).reshape(g * r, *q.shape[2:])
    heads = (a.transpose(2, 0, 3, 1) for a in (scaled, k, v))  # [B, heads, T, E]
    out: Any = jax.vmap(lambda *row: kernel(*row[:3], splash.SegmentIds(row[3], row[3])))(
        *heads, segment)
    return out.transpose(1, 3, 0, 2).reshape(q.shape)


def _triton(q: Array, k: Array, v: Array, segment: Array, *, interpret: bool) -> Array:
    """GPU: the kernel wants as many key heads as query heads, so those of a group are repeated."""
    from jax.experimental.pallas.ops.gpu import attention

    g, r, e, rows, total = q.shape

    def heads(a: Array) -> Array:  # [B, T, heads, E]
        wide = jnp.broadcast_to(a if a.ndim == 5 else a[:, None], (g, r, e, rows, total))
        return wide.reshape(g * r, e, rows, total).transpose(2, 3, 0, 1)

    sizes = attention.BlockSizes(
        block_q=64, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)
    out: Any = attention.mha(heads(q), heads(k), heads(v), segment, sm_scale=e**-0.5,
                             causal=True, block_sizes=sizes, interpret=interpret)
    return out.transpose(2, 3, 0, 1).reshape(q.shape)
