"""Forward passes in which the bits of a token's result depend only on the tokens before it.

Norms, products and attention are machine code that takes each sum in a fixed order, whatever else
is in the batch. XLA is as exact for elementwise operations but not for its own sums, so a prompt
runs through the forward pass of verification, as a tree that is a chain (experiments/LOG.md).
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.narrow_matmul import narrow_matmul

from specrl_jax.config import check
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.cache import SegmentedKV
from specrl_jax.model.transformer import LayerKV, Packing, tree_forward
from specrl_jax.structs import Array, Cache, Params

IMPLEMENTATION = "machine"  # of norms, products and attention
_MULTIPLE = 16  # of features, and of a cache's segments


def check_possible(arch: Architecture, dtype: str, mesh: Mesh) -> None:
    """Raises ConfigError with the reason if model.numerics = "invariant" cannot work on a mesh."""
    def refuse(reason: object) -> None:
        check(False, "model.numerics", "invariant", f"{reason}; use default")

    if mesh.shape["tensor"] > 1:
        refuse(f"mesh.tensor = {mesh.shape['tensor']} splits sums over devices")
    if arch.head_dim % _MULTIPLE:
        refuse(f"heads of {arch.head_dim} features, no multiple of {_MULTIPLE}")
    one = AbstractMesh((), (), abstract_device=mesh.abstract_mesh.abstract_device)
    for inner in {arch.hidden_size, arch.num_heads * arch.head_dim, arch.intermediate_size}:
        shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, inner), (inner, 1)))
        try:
            with use_abstract_mesh(one):
                jax.eval_shape(
                    lambda w, x: narrow_matmul(w, x, implementation=IMPLEMENTATION), *shapes)
        except Unsupported as reason:
            refuse(reason)


def prompt_forward(arch: Architecture, params: Params, tokens: Array, taps: tuple[int, ...]
                   ) -> tuple[LayerKV, Array | None]:
    """Runs the model on prompts, as trees that are chains, over an empty cache.

    Args:
      tokens: i32[p, P'].
      taps: layers whose outputs are returned, 0-based.

    Returns:
      per layer (k, v), each [G, E, p, P'], and the residual stream after each of `taps`,
      [len(taps) * F, p, P'], None if there are none.
    """
    prompts, width = tokens.shape
    place = jnp.arange(tokens.size, dtype=jnp.int32).reshape(prompts, width)
    column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], place.shape)
    packing = Packing(row=(place // width).reshape(-1), node=column.reshape(-1), place=place,
                      parent=jnp.maximum(column - 1, 0))
    # XLA would fold constant positions into rotations with another rounding.
    position = jax.lax.optimization_barrier(column.reshape(-1))
    shape = (prompts, arch.num_kv_heads)
    nothing = ([jnp.zeros((*shape, arch.head_dim, _MULTIPLE))],
               [jnp.zeros((*shape, _MULTIPLE, arch.head_dim))])
    cache = Cache(kv=SegmentedKV([nothing] * arch.num_layers),
                  length=jnp.zeros(prompts, jnp.int32))
    _, fresh, tapped = tree_forward(arch, params, cache, tokens.reshape(-1), position, packing,
                                    IMPLEMENTATION, taps)
    fresh = jax.tree.map(lambda a: a.reshape(*a.shape[:2], prompts, width), fresh)
    return fresh, None if tapped is None else tapped.reshape(-1, prompts, width)
