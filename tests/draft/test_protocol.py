"""The least that a drafter has to write: a `propose`, and every other field has a default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ask, make_engine, make_task, roll_out, streams, tiny_arch, tiny_params

from specrl_jax.control import fixed, protocol
from specrl_jax.draft.protocol import Drafter, Survive
from specrl_jax.draft.tree import chain
from specrl_jax.structs import (
    Array,
    DrafterParams,
    DrafterState,
    DraftTree,
    Frontier,
    Sampling,
    SpecConfig,
)


def repeat_last(depth: int) -> Drafter:
    """Proposes the last token again, `depth` times."""
    def propose(params: DrafterParams, state: DrafterState, frontier: Frontier, rows: Sampling,
                spec: SpecConfig, survive: Survive) -> tuple[DraftTree, DrafterState]:
        tokens = jnp.broadcast_to(frontier.root, (depth, *frontier.root.shape))
        sure = jnp.full(tokens.shape, 0.3)
        return chain(tokens, sure, frontier, spec, survive, nodes=depth + 1), state

    return Drafter(nodes=depth + 1, depth=depth, branch=1, propose=propose, names=("repeat",))


@pytest.mark.ci
def test_drafter_of_one_function_changes_no_token() -> None:
    arch, task = tiny_arch(), make_task()
    params = tiny_params(arch)
    plain = make_engine(arch, task, batch=4)
    drafting = make_engine(arch, task, batch=4, min_batch=2, drafter=repeat_last(2),
                           controller=fixed.fixed())
    drafting.control = protocol.make_spec(2, 1, 3, 0)
    for engine in (plain, drafting):
        engine.compile(params)
    asked = ask(task, temperature=0.3)
    found = roll_out(drafting, params, asked)
    assert streams(found) == streams(roll_out(plain, params, asked))
    assert found.by_drafter["repeat"]["drafted"] > 0


def rows(live: list[bool]) -> Frontier:
    index = jnp.arange(len(live))
    return Frontier(root=index + 5, seq=index, generated=index, context=index + 3,
                    live=jnp.asarray(live))


def halve(above: Array, draft_prob: Array, depth: Array, origin: Array) -> Array:
    return above * draft_prob / 2


def test_chain_ends_at_steps_dead_rows_and_negative_tokens() -> None:
    tokens = jnp.asarray([[1, 2, 3], [4, -1, 6], [7, 8, 9]])
    tree = jax.jit(chain, static_argnames=("survive", "nodes", "origin"))(
        tokens, jnp.full((3, 3), 0.5), rows([True, True, False]), protocol.make_spec(2, 1, 5, 0),
        survive=halve, nodes=5, origin=1)
    tree = jax.tree.map(np.asarray, tree)
    assert tree.live.tolist() == [[True] * 3 + [False] * 2, [True] * 2 + [False] * 3, [False] * 5]
    assert tree.tokens[0].tolist() == [5, 1, 4, 0, 0]
    assert tree.parent[0].tolist() == [0, 0, 1, 0, 0]
    assert tree.depth[0].tolist() == [0, 1, 2, 0, 0]
    assert tree.origin[0].tolist() == [0, 1, 1, 0, 0]
    np.testing.assert_allclose(tree.survival[0], [1, 1 / 4, 1 / 16, 0, 0])
    assert not tree.broken.any() and tree.proposal is None


def test_default_state_follows_the_rows_of_the_batch() -> None:
    drafter = repeat_last(1)._replace(init=lambda info: {"seen": np.arange(4)})
    moved = drafter.select_rows({"seen": jnp.arange(4) * 10}, jnp.asarray([3, 1]))
    assert moved["seen"].tolist() == [30, 10]
    assert not drafter.needs_catch_up and drafter.skip_to((), np.ones(4)) == ()
