"""No drafter: trees of one node, so that the program is that of plain decoding."""

from specrl_jax.draft.protocol import Drafter
from specrl_jax.draft.tree import roots


def off() -> Drafter:
    return Drafter(
        nodes=1, depth=0, branch=1,
        init=lambda info: (),
        propose=lambda params, state, frontier, rows, spec, survive: (
            roots(frontier.root, frontier.live, 1), state),
        observe=lambda params, state, frontier, verdict, path: state,
        take=lambda state, rows: state, names=())
