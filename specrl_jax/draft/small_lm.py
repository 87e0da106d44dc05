"""A smaller model with the actor's tokenizer drafts chains and trees from its own distribution.

It reads committed tokens and nothing else of the actor. Its cache holds every position up to the
root; the tokens that a round committed are processed before the next tree grows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specrl_jax.draft import cached
from specrl_jax.draft.network import Growth, Network
from specrl_jax.draft.protocol import Drafter
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture, describe
from specrl_jax.model.transformer import Attend
from specrl_jax.structs import Array, ModelParams, Params


def small_lm(arch: Architecture, depth: int, branch: int, nodes: int, children: str = "perturbed",
             *, temperature: float = 1.0, origin: int = 0, drawn: bool = False,
             dtype: DTypeLike = jnp.float32) -> Drafter:
    """Returns the drafter with D = `depth`, K = `branch`, N = `nodes`.

    Its own parameters, which `bind` is given, are those of architecture.describe.

    Args:
      arch: the small model's.
      others: see eagle.eagle.

    Raises:
      ConfigError: sizes that cannot work.
    """
    growth = Growth(_network(arch), depth, branch, nodes, children, origin, temperature, drawn)
    cast = jax.jit(_cast, static_argnums=(0, 2, 3))
    return cached.drafter(growth, arch, dtype, name="small_lm",
                          bind=functools.partial(_bind, arch, cast))


def _network(arch: Architecture) -> Network:
    def run(params: Params, token: Array, features: Array | None, position: Array, attend: Attend
            ) -> Array:
        rotation = transformer.rotations(arch, position)
        known = jnp.minimum(token, arch.vocab_size - 1)  # the actor may have more rows
        x = transformer.embed(params, known)
        for index, layer in enumerate(params["layers"]):
            x, _ = transformer.block(arch, layer, index, x, rotation, attend, decode=True)
        return transformer.rms_norm(x, params["final_norm"], arch.norm_eps)

    return Network(
        run=run, logits=functools.partial(transformer.logits, arch, decode=True),
        vocab=lambda params: jnp.arange(arch.vocab_size, dtype=jnp.int32),
        vocab_size=arch.vocab_size, ahead=0)


def _bind(arch: Architecture, cast: Callable[..., Any], actor: ModelParams, own: Params) -> Params:
    """Returns the small model in the dtype and on the mesh of the published actor."""
    return cast(arch, own, actor["embed"].dtype, cached.mesh_of(actor["embed"]))


def _cast(arch: Architecture, own: Params, dtype: DTypeLike, mesh: Mesh | None) -> Params:
    return cached.cast(own, describe(arch), dtype, mesh)
