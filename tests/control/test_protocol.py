"""What is kept of drafts and in which bucket, and controllers that plan always the same."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import LADDER, load, random_tree

from specrl_jax.config import ConfigError, ControlConfig
from specrl_jax.control import fixed
from specrl_jax.control.buckets import Bucket
from specrl_jax.control.protocol import Plan, make_spec, prune_within
from specrl_jax.structs import DraftTree, SpecConfig

NARROW = (Bucket(4, 1), Bucket(10, 4))  # too small for all that may be drafted


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
def prune(spec: SpecConfig, tree: DraftTree, ladder: tuple[Bucket, ...]) -> Any:
    return prune_within(spec, tree, ladder)


@pytest.mark.parametrize("ladder", [LADDER, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("seed", range(30))
def test_keep_within_equals_brute_force(
        seed: int, ladder: tuple[Bucket, ...]) -> None:
    rng = np.random.default_rng(seed)
    tree, nodes, budget = random_tree(rng), int(rng.integers(0, 8)), int(rng.integers(0, 20))
    live, bucket = prune(make_spec(3, 2, nodes, budget), tree, ladder)
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


def test_fixed_drops_unlikely_nodes() -> None:
    tree = random_tree(np.random.default_rng(1))
    controller = fixed.fixed(min_survival=0.4)
    spec = make_spec(3, 2, 7, 0)
    live, _ = controller.prune(spec, Plan(spec, jnp.int32(1)), load(4), tree, LADDER)
    np.testing.assert_array_equal(live, tree.live & (tree.survival >= 0.4))
    assert 0 < live.sum() < tree.live.sum()


@pytest.mark.parametrize("changes,name", [
    ({"policy": ""}, "control.policy"), ({"cost_updates": "wall"}, "control.cost_updates"),
    ({"settings": ("4x1",)}, "control.settings"), ({"settings": ("0x1x2",)}, "control.settings"),
    ({"length_weight": 2.0}, "control.length_weight"), ({"min_survival": -1.0}, "min_survival")])
def test_config_refuses_bad_control_options(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name) as error:
        ControlConfig(**changes)
    assert "\n" not in str(error.value)
