"""Chains of tokens as trees, and the defaults of a drafter's fields."""

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.control import protocol
from specrl_jax.draft.protocol import Drafter, DraftRequest
from specrl_jax.draft.tree import chain
from specrl_jax.structs import (
    Array,
    Frontier,
)


def rows(live: list[bool]) -> Frontier:
    index = jnp.arange(len(live))
    return Frontier(root=index + 5, seq=index, generated=index, context=index + 3,
                    live=jnp.asarray(live))


def halve(above: Array, draft_prob: Array, depth: Array, origin: Array) -> Array:
    return above * draft_prob / 2


def test_chain_ends_at_steps_dead_rows_and_negative_tokens() -> None:
    tokens = jnp.asarray([[1, 2, 3], [4, -1, 6], [7, 8, 9]])
    request = DraftRequest(rows([True, True, False]), None, protocol.make_spec(2, 1, 5, 0), halve)
    tree = jax.jit(chain, static_argnames=("nodes", "origin"))(
        tokens, jnp.full((3, 3), 0.5), request, nodes=5, origin=1)
    tree = jax.tree.map(np.asarray, tree)
    assert tree.live.tolist() == [[True] * 3 + [False] * 2, [True] * 2 + [False] * 3, [False] * 5]
    assert tree.tokens[0].tolist() == [5, 1, 4, 0, 0]
    assert tree.parent[0].tolist() == [0, 0, 1, 0, 0]
    assert tree.depth[0].tolist() == [0, 1, 2, 0, 0]
    assert tree.origin[0].tolist() == [0, 1, 1, 0, 0]
    np.testing.assert_allclose(tree.survival[0], [1, 1 / 4, 1 / 16, 0, 0])
    assert not tree.broken.any() and tree.proposal is None


def test_default_state_follows_the_rows_of_the_batch() -> None:
    drafter = Drafter(nodes=2, depth=1, branch=1, propose=lambda *args: (None, args[1]),
                      names=("none",), init=lambda info: {"seen": np.arange(4)})
    moved = drafter.select_rows({"seen": jnp.arange(4) * 10}, jnp.asarray([3, 1]))
    assert moved["seen"].tolist() == [30, 10]
    assert not drafter.needs_catch_up and drafter.skip_to((), np.ones(4)) == ()
