"""A smaller model with the actor's tokenizer drafts chains and trees from its own distribution.

It reads committed tokens and nothing else of the actor. Its cache holds every position up to the
root; the tokens that a round committed are processed before the next tree grows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specrl_jax.draft import cached
from specrl_jax.draft.network import Growth, Network, Truncate
from specrl_jax.draft.protocol import Drafter
from specrl_jax.model import layers, transformer
from specrl_jax.model.architecture import Architecture, describe
from specrl_jax.model.transformer import Attend
from specrl_jax.runtime.compilation import call
from specrl_jax.structs import Array, Params


def draft_model(arch: Architecture, depth: int, branch: int, nodes: int,
                children: str = "perturbed", *, temperature: float = 1.0, origin: int = 0,
                drawn: bool = False, truncate: Truncate | None = None,
                dtype: DTypeLike = jnp.float32) -> Drafter:
    """Returns the drafter of a model `arch`, whose parameters `bind` is given.

    Args:
      truncate: drafts are truncated as their rows are, so that more are accepted; except in drawn
        trees, whose shape must depend on no token.

    See eagle.eagle for the other arguments and the errors.
    """
    growth = Growth(_network(arch), depth, branch, nodes, children, origin, temperature,
                    drawn, None if drawn else truncate)
    return cached.drafter(growth, arch, dtype, name="draft_model", bind=lambda actor, own: call(
        _cast, arch, own, actor["embed"].dtype, cached.mesh_of(actor["embed"])))


def _network(arch: Architecture) -> Network:
    def run(params: Params, token: Array, features: Array | None, position: Array, attend: Attend
            ) -> Array:
        rotation = transformer.rotations(arch, position)
        known = jnp.minimum(token, arch.vocab_size - 1)  # the actor may have more rows
        x, _, _ = layers.run(params["layers"], lambda layer, index, x: transformer.block(
            arch, layer, index, x, rotation, attend, decode=True), transformer.embed(params, known))
        return transformer.rms_norm(x, params["final_norm"], arch.norm_eps)

    return Network(run=run, logits=functools.partial(transformer.logits, arch, decode=True),
                   vocab=lambda params: jnp.arange(arch.vocab_size, dtype=jnp.int32),
                   vocab_size=arch.vocab_size, ahead=0)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _cast(arch: Architecture, own: Params, dtype: DTypeLike, mesh: Mesh | None) -> Params:
    return cached.cast(own, describe(arch), dtype, mesh)
