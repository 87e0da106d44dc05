"""The repetition penalty, a function of the tokens before: so it changes no law of a rule.

A node's own path counts as said, whether it is accepted or not, because what is drawn after the
node is emitted only if it is.
"""

import jax.numpy as jnp

from specrl_jax.model.transformer import Packing
from specrl_jax.structs import Array


def penalize(logits: Array, penalty: float, said: Array, tokens: Array, packing: Packing,
             depth: int) -> Array:
    """Returns logits f32[V, W] in which tokens that were said count for less (arXiv:1909.05858).

    As in transformers and vLLM: a positive logit is divided by the penalty, a negative one
    multiplied with it, once for each token of the prompt or the answer before.

    Args:
      said: bool[B, V] the tokens up to each row's root, which is one of them.
      tokens: i32[B, n] of the nodes in `packing`.
      depth: D, most edges between a root and a node.
    """
    said, place = said[packing.row], jnp.arange(packing.row.shape[0])
    node = packing.node
    for _ in range(depth):
        said = said.at[place, tokens[packing.row, node]].set(True)
        node = packing.parent[packing.row, node]  # a root is its own parent
    return jnp.where(said.T, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
