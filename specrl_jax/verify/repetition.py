"""The repetition penalty. It depends only on preceding tokens, so verification stays exact.

The path to a node counts as preceding tokens even before it is accepted: the token drawn after the
node is emitted only if the path is.
"""

import jax.numpy as jnp

from specrl_jax.model.transformer import Packing
from specrl_jax.structs import Array


def penalize(logits: Array, penalty: float, said: Array, tokens: Array, packing: Packing,
             depth: int) -> Array:
    """Returns logits f32[V, W], penalised where the token occurred before (arXiv:1909.05858).

    As in transformers and vLLM, positive logits are divided by the penalty and negative ones
    multiplied by it, however often the token occurred in prompt and response.

    Args:
      said: bool[B, V] the tokens up to and including each row's root.
      tokens: i32[B, n] of the nodes in `packing`.
      depth: D, most edges between a root and a node.
    """
    said, position = said[packing.row], jnp.arange(packing.row.shape[0])
    node = packing.node
    for _ in range(depth):
        said = said.at[position, tokens[packing.row, node]].set(True)
        node = packing.parent[packing.row, node]  # a root is its own parent
    return jnp.where(said.T, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
