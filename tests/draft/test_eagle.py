"""The EAGLE drafter against a full recompute."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_slots import (
    NODES,
    ROWS,
    Slots,
    check_nodes,
    path_to,
    recomputed,
)

from specrl_jax.control.protocol import make_spec

OTHERS = [pytest.param(name, marks=pytest.mark.ci) for name in ("top", "sampled")]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("children", ["perturbed", *OTHERS])
def test_nodes_are_what_a_full_forward_of_their_paths_says(children: str, temperature: float
                                                           ) -> None:
    slots = Slots(children, temperature=temperature)
    slots.wander(4, seed=1)
    slots.live = np.asarray([True, True, True, False])
    tree = slots.draft()
    check_nodes(slots, tree, recomputed(slots, tree), children=children, rows=range(3))


@pytest.mark.ci
def test_sampled_children_use_noise_of_their_own() -> None:
    trees = {name: Slots(name).draft() for name in ("perturbed", "top", "sampled")}
    hot = [0, 1, 3]
    for other in ("perturbed", "top"):
        assert (trees["sampled"].tokens[hot] != trees[other].tokens[hot]).any()
    np.testing.assert_array_equal(trees["sampled"].tokens[2], trees["top"].tokens[2])  # greedy
    slots = Slots("sampled")
    slots.rows = slots.rows.replace(key=slots.rows.key + 1)
    assert (slots.draft().tokens[hot] != trees["sampled"].tokens[hot]).any()


@pytest.mark.parametrize("between", [None, make_spec(0, 1, 1, 0), make_spec(1, 1, 4, 0)],
                         ids=["not asked", "steps 0", "steps 1"])
def test_catching_up_late_changes_nothing(between: Any) -> None:
    always, seldom = Slots(seed=4), Slots(seed=4)
    always.wander(6, seed=2)
    seldom.wander(6, seed=2, spec=between)
    if between is None or between.depth == 0:
        assert (np.asarray(seldom.state.cache.length) == 0).all()
    one, other = always.draft(), seldom.draft()
    np.testing.assert_array_equal(always.state.cache.length, always.context)
    np.testing.assert_array_equal(seldom.state.cache.length, seldom.context)
    np.testing.assert_allclose(always.state.cache.hidden, seldom.state.cache.hidden, atol=1e-4)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.survival, other.survival, atol=1e-4)


@pytest.mark.ci
def test_smaller_tree_holds_the_likeliest_nodes() -> None:
    large, small = Slots(seed=8), Slots(seed=8, nodes=5)
    whole, part = large.draft(), small.draft()
    for b in range(ROWS):
        order = np.argsort(-whole.survival[b], kind="stable")[:5]
        wanted = sorted(map(tuple, (path_to(whole, b, n) for n in order)))
        assert sorted(tuple(path_to(part, b, n)) for n in range(5)) == wanted
        assert part.live[b].all()


@pytest.mark.parametrize("steps", [1, 3])
def test_depth_and_branching_are_data(steps: int) -> None:
    slots, chain = Slots(seed=10), Slots(seed=10, branch=1, nodes=NODES)
    tree = slots.draft(make_spec(steps, 1, NODES, 0))
    same = chain.draft(make_spec(steps, 1, NODES, 0))
    assert (tree.live.sum(1) == 1 + steps).all() and tree.depth.max() == steps
    for name in ("tokens", "parent", "live", "logq", "survival"):
        np.testing.assert_allclose(getattr(tree, name), getattr(same, name), atol=1e-5,
                                   err_msg=name)
    assert slots.compiled._cache_size() == 1


def test_garbage_changes_no_bit() -> None:
    clean, dirty = Slots(seed=11), Slots(seed=11)
    for slots in (clean, dirty):
        slots.wander(3, seed=5)
    clean_tree = clean.draft()
    state = dirty.state
    place = np.arange(state.features.shape[1])[None]
    beyond = place >= dirty.context[:, None]
    unread = place >= np.asarray(state.cache.length)[:, None]
    ((k, v),) = state.cache.kv
    dirty.state = state.replace(
        features=jnp.where(beyond[..., None], jnp.nan, state.features),
        tokens=state.tokens.at[:, 1:].set(jnp.where(beyond, -5, state.tokens[:, 1:])),
        cache=state.cache.replace(kv=[(jnp.where(unread[:, None, None], 1e4, k),
                                       jnp.where(unread[:, None, :, None], -1e4, v))]))
    jax.tree.map(np.testing.assert_array_equal, clean_tree, dirty.draft())


def test_scores_that_are_not_finite_are_named_at_any_depth() -> None:
    slots = Slots(seed=12)
    whole = slots.draft()
    assert not whole.broken.any()
    child = int(whole.tokens[1, 1])
    assert whole.depth[1, 1] == 1 and (whole.parent[1, 1:] == 1).any()
    slots.params = slots.params.replace(embed=slots.params.embed.at[child].set(jnp.nan))
    tree = slots.draft()
    assert tree.broken[1] and tree.tokens[1, 1] == child  # found below it
    others = ~(whole.tokens == child).any(1)
    assert others.any() and not tree.broken[others].any()


def test_prompt_of_one_token_waits_for_its_feature() -> None:
    slots = Slots(seed=13)
    slots.context[0] = slots.born[0] = 0
    slots.fill(source=[0, -1, -1, -1])
    assert not slots.draft().live[0, 1:].any()
    slots.commit([1, 0, 0, 0])
    assert slots.draft().live[0, 1:].all()


def test_nothing_follows_a_stop_token() -> None:
    free = Slots(seed=14)
    tree = free.draft()
    inner = [n for n in range(1, NODES) if (tree.parent[0, 1:] == n).any()]
    stop = int(tree.tokens[0, inner[0]])
    slots = Slots(seed=14)
    slots.rows = slots.rows.replace(stop=jnp.full(1, stop))
    tree = slots.draft()
    ends = np.flatnonzero((tree.tokens[0] == stop) & tree.live[0])
    assert any(n > 0 for n in ends)
    assert not np.isin(tree.parent[0, 1:][tree.live[0, 1:]], ends[ends > 0]).any()


def test_refilled_slots_draft_as_fresh_ones() -> None:
    slots = Slots(seed=15)
    slots.wander(3, seed=7)  # the source has run on
    slots.said[2], slots.thought[2], slots.born[2] = (
        slots.said[0], slots.thought[0], slots.born[0])
    slots.context[2] = slots.born[2]
    slots.context[:2] = slots.born[:2]  # one takes its own prompt again, one is prefilled
    slots.fill(copy=[0, -1, 0, -1], source=[-1, 1, -1, -1])
    want = [slots.born[0] - 1, 0, slots.born[0] - 1]
    np.testing.assert_array_equal(slots.state.cache.length[:3], want)
    slots.rows = slots.rows.replace(temperature=jnp.ones(ROWS), key=slots.rows.key.at[2].set(
        slots.rows.key[0]))
    tree = slots.draft()
    fresh = Slots(seed=15)
    fresh.rows = fresh.rows.replace(temperature=jnp.ones(ROWS))
    wanted = fresh.draft()
    for b, other in ((0, 0), (1, 1), (2, 0)):
        np.testing.assert_array_equal(tree.tokens[b], wanted.tokens[other])
        np.testing.assert_allclose(tree.logq[b], wanted.logq[other], atol=1e-4)
    slots.commit([2, 1, 3, 1])
    assert slots.draft().live[:, 1:].all()


def test_rows_move_with_the_batch() -> None:
    slots = Slots(seed=16)
    slots.wander(2, seed=8)
    moved = slots.drafter.select_rows(slots.state, jnp.asarray([3, 1]))
    assert moved.features.shape[0] == 2
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, np.asarray(old)[[3, 1]]),
                 moved, slots.state)
