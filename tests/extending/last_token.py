"""A drafter that proposes the last token again, which is right wherever a response repeats it."""

from typing import Any

import jax.numpy as jnp

from specrl_jax.draft.protocol import Drafter, DraftRequest
from specrl_jax.draft.registry import DrafterContext, DrafterPart
from specrl_jax.draft.tree import chain
from specrl_jax.structs import DraftTree

GUESS = 0.5  # probability of acceptance, until the rollout has measured it


def last_token(context: DrafterContext) -> DrafterPart:
    """Returns the drafter of spec.drafter = last_token:last_token."""
    depth, nodes = context.sizes["depth"], context.sizes["nodes"]

    def propose(params: Any, state: Any, request: DraftRequest) -> tuple[DraftTree, Any]:
        tokens = jnp.tile(request.frontier.root[None], (depth, 1))  # i32[D, B]
        tree = chain(tokens, jnp.full(tokens.shape, GUESS), request, nodes=nodes,
                     origin=context.origin)
        return tree, state

    drafter = Drafter(nodes=nodes, depth=depth, branch=1, propose=propose, names=("last_token",))
    return DrafterPart("last_token", drafter)
