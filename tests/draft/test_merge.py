"""Merged trees hold the best nodes of each, once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.control.protocol import make_spec
from specrl_jax.draft.merge import merge
from specrl_jax.draft.protocol import Drafter, DraftRequest
from specrl_jax.draft.tree import roots
from specrl_jax.structs import DraftTree, Frontier

ROOT = 7
Node = tuple[int, int, float]  # parent, token, survival


def tree_of(rows: list[list[Node]], nodes: int, origin: int = 0) -> DraftTree:
    fields: dict[str, Any] = {name: np.zeros((len(rows), nodes), np.int32)
                              for name in ("tokens", "parent", "depth")}
    survival, live = np.zeros((len(rows), nodes), np.float32), np.zeros((len(rows), nodes), bool)
    for b, row in enumerate(rows):
        fields["tokens"][b, 0], survival[b, 0], live[b, 0] = ROOT, 1, True
        for n, (parent, token, share) in enumerate(row, 1):
            fields["parent"][b, n], fields["tokens"][b, n] = parent, token
            fields["depth"][b, n] = fields["depth"][b, parent] + 1
            survival[b, n], live[b, n] = share, True
    whole = np.zeros((len(rows), nodes), np.int32)
    real = np.zeros((len(rows), nodes), np.float32)
    return jax.tree.map(jnp.asarray, DraftTree(
        **fields, rank=whole, origin=whole + origin, survival=survival, logq=real, draft_prob=real,
        score_gap=real, live=live, broken=np.zeros(len(rows), bool)))


def drafter(rows: list[list[Node]], nodes: int, origin: int, **more: Any) -> Drafter:
    def propose(params: Any, state: Any, request: DraftRequest) -> Any:
        frontier = request.frontier
        drafted = tree_of(rows, nodes, origin)
        plain = roots(frontier.root, frontier.live, nodes)
        drafts = request.spec.depth > 0
        return jax.tree.map(lambda a, b: jnp.where(drafts, a, b), drafted, plain), state + 1

    return Drafter(nodes=nodes, depth=3, branch=nodes, init=lambda info: 0, propose=propose,
                   select_rows=lambda state, rows: state, names=(f"part{origin}",), **more)


def proposed(first: list[list[Node]], second: list[list[Node]], nodes: int = 6,
             mix: tuple[float, ...] = (1.0, 1.0)) -> list[dict[tuple[int, ...], tuple]]:
    """Of each row, tokens from the root on -> (survival, origin)."""
    joined = merge([drafter(first, 5, 0), drafter(second, 4, 1)], nodes)
    rows = len(first)
    one = jnp.zeros(rows, jnp.int32)
    frontier = Frontier(root=one + ROOT, seq=one, generated=one, context=one, live=one == 0)
    tree, state = jax.jit(joined.propose)(((), ()), (0, 0), DraftRequest(
        frontier, None, make_spec(3, 2, nodes, 0, mix), None))
    assert state == (1, 1) and tree.live.shape == (rows, nodes)
    t = jax.tree.map(np.asarray, tree)
    out = []
    for b in range(rows):
        paths: dict[int, tuple[int, ...]] = {0: ()}
        actual = {}
        for n in range(1, nodes):
            if t.live[b, n]:
                assert t.parent[b, n] < n and t.live[b, t.parent[b, n]]
                paths[n] = (*paths[t.parent[b, n]], int(t.tokens[b, n]))
                assert t.depth[b, n] == len(paths[n])
                assert paths[n] not in actual, "siblings hold distinct tokens"
                actual[paths[n]] = (round(float(t.survival[b, n]), 4), int(t.origin[b, n]))
        assert t.live[b, 0] and t.tokens[b, 0] == ROOT
        out.append(actual)
    return out


def test_merge_keeps_the_best_nodes_of_both_once() -> None:
    first = [[(0, 1, 0.9), (1, 2, 0.5), (2, 3, 0.1)], [(0, 1, 0.2)]]
    second = [[(0, 1, 0.6), (1, 5, 0.55), (0, 4, 0.3)], [(0, 8, 0.7), (1, 9, 0.6)]]
    got = proposed(first, second, nodes=5)
    assert got[0] == {(1,): (0.9, 0), (1, 2): (0.5, 0), (1, 5): (0.55, 1), (4,): (0.3, 1)}
    assert got[1] == {(1,): (0.2, 0), (8,): (0.7, 1), (8, 9): (0.6, 1)}


def test_mix_weighs_and_switches_off() -> None:
    first, second = [[(0, 1, 0.5)]], [[(0, 2, 0.6)]]
    assert proposed(first, second, mix=(1.0, 0.5)) == [{(1,): (0.5, 0), (2,): (0.3, 1)}]
    assert proposed(first, second, mix=(1.0, 0.0)) == [{(1,): (0.5, 0)}]
    assert proposed(first, second, mix=(0.0, 1.0)) == [{(2,): (0.6, 1)}]


def test_random_trees_merge_to_the_best_of_the_union() -> None:
    rng = np.random.default_rng(0)
    first, second = [_random(rng, 4) for _ in range(60)], [_random(rng, 3) for _ in range(60)]
    for actual, *trees in zip(proposed(first, second, nodes=5), first, second, strict=True):
        union = _union(trees)
        best = sorted(union.values(), reverse=True)[:4]
        assert sorted((s for s, _ in actual.values()), reverse=True) == pytest.approx(best)
        assert all(union[path] == pytest.approx(s, abs=1e-4) for path, (s, _) in actual.items())


def _random(rng: np.random.Generator, count: int) -> list[Node]:
    nodes: list[Node] = []
    for n in range(1, int(rng.integers(1, count + 1)) + 1):
        parent = int(rng.integers(0, n))
        taken = {t for p, t, _ in nodes if p == parent}
        token = int(rng.choice([t for t in range(4) if t not in taken]))
        above = 1.0 if parent == 0 else nodes[parent - 1][2]
        nodes.append((parent, token, round(above * float(rng.uniform(0.2, 0.95)), 3)))
    return nodes


def _union(trees: list[list[Node]]) -> dict[tuple[int, ...], float]:
    union: dict[tuple[int, ...], float] = {}
    for nodes in trees:
        paths: list[tuple[int, ...]] = [()]
        for parent, token, survival in nodes:
            paths.append((*paths[parent], token))
            union[paths[-1]] = max(union.get(paths[-1], 0), survival)
    for path in sorted(union, key=len, reverse=True):
        if len(path) > 1:
            union[path[:-1]] = max(union[path[:-1]], union[path])
    return union
