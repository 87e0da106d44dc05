"""Survival estimates follow what was observed, and only what could be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.control import acceptance
from specrl_jax.control.acceptance import BINS, Acceptance
from specrl_jax.structs import DraftTree, Frontier, Path, Verdict

DEPTH = 3


def seen(tried: Any, hit: Any) -> Acceptance:
    return Acceptance(np.asarray(tried, np.float32), np.asarray(hit, np.float32))


def none(shards: int = 1) -> Acceptance:
    shape = (shards, 1, DEPTH, BINS)
    return seen(np.zeros(shape), np.zeros(shape))


def test_table_follows_outcomes_and_keeps_their_order() -> None:
    rng = np.random.default_rng(0)
    tried = rng.integers(50, 400, (1, DEPTH, BINS))
    truth = np.sort(rng.random((1, DEPTH, BINS)), 2)
    known = seen(tried, tried * truth)
    estimate = acceptance.table(known, none())
    assert (np.diff(estimate, axis=2) >= 0).all()
    np.testing.assert_allclose(estimate, truth, atol=0.3)
    sure = acceptance.table(seen(tried * 1000, tried * 1000 * truth), none())
    np.testing.assert_allclose(sure, truth, atol=2e-3)


def test_survival_is_closed_under_parent_and_siblings_share_it() -> None:
    estimate = jnp.full((2, DEPTH, BINS), 0.9)
    parent = jnp.asarray([[0.8, 0.8, 0.8]])
    ones = jnp.ones((1, 3), jnp.int32)
    survival = acceptance.survive(estimate, parent, jnp.asarray([[0.9, 0.9, 0.1]]), 2 * ones, ones)
    assert (np.asarray(survival) <= 0.8).all()
    np.testing.assert_allclose(survival.sum(), 0.8, rtol=1e-6)


#      0 root
#     / |
#    1  2        the actor drew 2's token at the root and 4's at 2; nothing below 4 fits
#   /   | |
#  3    4 5
#       |
#       6
PARENT = [0, 0, 0, 1, 2, 2, 4]
LEVEL = [0, 1, 1, 2, 2, 2, 3]
TOKENS = [9, 11, 12, 13, 14, 15, 16]
DRAW = [12, 0, 14, 0, 99, 0, 0]


def outcome(count: int = 3, verified: Any = (1,) * 7, live: bool = True) -> Acceptance:
    def row(values: Any, kind: Any = jnp.int32) -> Any:
        return jnp.asarray(values, kind)[None]

    blank = jnp.zeros((1, 7))
    tree = DraftTree(tokens=row(TOKENS), parent=row(PARENT), depth=row(LEVEL),
                     rank=row([0] * 7), origin=row([0, 0, 0, 0, 0, 0, 0]), survival=blank,
                     logq=blank, draft_prob=blank + 0.5, score_gap=blank, live=row(verified, bool),
                     broken=jnp.zeros(1, bool))
    path = Path(kv=(), taps=None, draw=row(DRAW), verified=row(verified, bool))
    zero = jnp.zeros((1, 4))
    verdict = Verdict(tokens=row([12, 14, 99, 99]), logprob=zero, raw_logprob=zero, top_p_mass=zero,
                      path=row([0, 2, 4, 4]), count=row(count), stopped=row(False))
    one = row(0)
    frontier = Frontier(root=one, seq=one, generated=one, context=one, live=jnp.asarray([live]))
    return jax.tree.map(np.asarray, acceptance.observe(
        jax.tree.map(jnp.asarray, none()), tree, path, verdict, frontier))


@pytest.mark.parametrize("count,tried,hit", [
    (3, [2, 2, 1], [1, 1, 0]),  # node 3's parent was not drawn, so nothing is known of it
    (2, [2, 2, 0], [1, 1, 0]),  # cut after two tokens: 4's own draw was not emitted
    (1, [2, 0, 0], [1, 0, 0]),
])
def test_observe_counts_known_outcomes_alone(count: int, tried: list[int], hit: list[int]) -> None:
    actual = outcome(count)
    assert actual.tried[0, 0].sum(1).tolist() == tried
    assert actual.hit[0, 0].sum(1).tolist() == hit


def test_nodes_that_were_not_verified_and_dead_rows_do_not_count() -> None:
    actual = outcome(verified=(1, 0, 1, 0, 1, 0, 0))
    assert actual.tried[0, 0].sum(1).tolist() == [1, 1, 0]
    assert outcome(live=False).tried.sum() == 0


def test_outcomes_of_all_shards_join_and_old_ones_fade() -> None:
    known, new = seen(np.full((1, 1, 2), 10), np.full((1, 1, 2), 4)), seen(
        np.ones((3, 1, 1, 2)), np.zeros((3, 1, 1, 2)))
    merged = acceptance.merge(known, new, 0.5)
    assert merged.tried.tolist() == [[[8.0, 8.0]]] and merged.hit.tolist() == [[[2.0, 2.0]]]
