"""No drafter: trees of one node, so the program is plain decoding."""

from specrl_jax.draft.protocol import Drafter
from specrl_jax.draft.tree import roots


def off() -> Drafter:
    """Returns the drafter that never drafts."""
    return Drafter(nodes=1, depth=0, branch=1, names=(),
                   propose=lambda params, state, request: (
                       roots(request.frontier.root, request.frontier.live, 1), state))
