"""What is kept of the drafts, and the bucket it goes into."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import LADDER, random_tree

from specrl_jax.config import ControlConfig, SpecOptions
from specrl_jax.control import protocol, registry
from specrl_jax.control.protocol import Bucket, make_spec
from specrl_jax.structs import DraftTree, Load, SpecConfig

NARROW = (Bucket(4, 1), Bucket(10, 4))  # too small for all that may be drafted


def load(live: Any) -> Load:
    live = jnp.asarray(live)
    return Load(live=live, length=live * jnp.int32(3), expected_left=jnp.ones(live.shape),
                room=live * jnp.int32(9), weight=jnp.ones(live.shape))


def brute_force(tree: DraftTree, nodes: int, budget: int) -> np.ndarray:
    """bool[B, N]: the likeliest nodes, row by row and then overall, roots first, ties by place."""
    survival, alive = np.asarray(tree.survival), np.asarray(tree.live)
    within = []
    for b in range(len(alive)):
        mine = [n for n in range(alive.shape[1]) if alive[b, n]]
        mine.sort(key=lambda n: (n > 0, -survival[b, n], n))  # noqa: B023
        within += [(n > 0, -survival[b, n], b, n) for n in mine[: max(nodes, 1)]]
    kept = np.zeros(alive.shape, bool)
    for _, _, b, n in sorted(within)[: max(budget or 10**9, int(alive[:, 0].sum()))]:
        kept[b, n] = True
    return kept


@functools.partial(jax.jit, static_argnums=2)
def keep(spec: SpecConfig, tree: DraftTree, ladder: tuple[Bucket, ...]) -> Any:
    return fixed.fixed().keep(spec, load(tree.live[:, 0]), spec, tree, ladder)


@pytest.mark.parametrize("ladder", [LADDER, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("seed", range(30))
def test_keep_equals_brute_force_and_is_closed_under_parent(
        seed: int, ladder: tuple[Bucket, ...]) -> None:
    rng = np.random.default_rng(seed)
    tree, nodes, budget = random_tree(rng), int(rng.integers(0, 8)), int(rng.integers(0, 20))
    live, bucket = keep(make_spec(3, 2, nodes, budget), tree, ladder)
    live = np.asarray(live)
    most = min(budget or 10**9, ladder[-1].packed)
    np.testing.assert_array_equal(live, brute_force(tree, min(nodes, ladder[-1].nodes), most))
    np.testing.assert_array_equal(live[:, 0], tree.live[:, 0])
    parents = np.take_along_axis(live, np.asarray(tree.parent), 1)
    assert (parents | ~live).all()
    assert (live.sum(1) <= max(nodes, 1)).all()
    assert not budget or live.sum() <= max(budget, live[:, 0].sum())
    fits = [live.sum() <= b.packed and live.sum(1).max() <= b.nodes for b in ladder]
    assert int(bucket) == fits.index(True)


def test_unlikely_nodes_are_not_kept() -> None:
    tree = random_tree(np.random.default_rng(1))
    controller = fixed.fixed(min_survival=0.4)
    spec = make_spec(3, 2, 7, 0)
    live, _ = controller.keep(spec, load(tree.live[:, 0]), spec, tree, LADDER)
    np.testing.assert_array_equal(live, tree.live & (tree.survival >= 0.4))
    assert 0 < live.sum() < tree.live.sum()


def test_off_plans_nothing() -> None:
    spec = fixed.off().plan((), load([True, False]))
    assert (int(spec.steps), int(spec.nodes)) == (0, 1)


def test_fixed_plans_its_state() -> None:
    controller = registry.make(ControlConfig(policy="fixed"), SpecOptions(
        steps=3, branch=2, nodes=6, budget=11))
    spec = controller.plan(controller.init(), load([True, True]))
    assert [int(x) for x in (spec.steps, spec.branch, spec.nodes, spec.budget)] == [3, 2, 6, 11]
    other = make_spec(1, 1, 2, 0)
    assert int(controller.plan(other, load([True])).steps) == 1


def test_a_depth_can_be_held_and_given_back() -> None:
    options = SpecOptions(steps=3, branch=2, nodes=6)
    fixed = registry.make(ControlConfig(policy="fixed"), options)
    held = fixed.depth(fixed.init(), 0)
    assert int(fixed.plan(held, load([True])).steps) == 0
    free = fixed.plan(fixed.depth(held, None), load([True]))
    assert (int(free.steps), int(free.nodes)) == (3, 6)
    clever = registry.make(ControlConfig(policy="bandit"), options)
    before = clever.init()
    assert clever.depth(before, 2).force.tolist() == [2, -1]
    assert clever.depth(clever.depth(before, 2), None).force.tolist() == before.force.tolist()


@pytest.mark.parametrize("control,drafter", [("off", "history"), ("fixed", "off")])
def test_off_by_either_name_is_off(control: str, drafter: str) -> None:
    controller = registry.make(ControlConfig(policy=control), SpecOptions(drafter=drafter))
    assert int(controller.plan(controller.init(), load([True])).steps) == 0
