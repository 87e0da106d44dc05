"""The walks by enumeration: emitted tokens have exactly the distribution of plain decoding.

Distributions are random tables over prefixes, so any mistake changes a number here.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.verify.match import walk
from specrl_jax.verify.protocol import Nodes
from specrl_jax.verify.rejection import decide

VOCAB, NODES, DEPTH = 4, 5, 4
WALK = jax.jit(walk, static_argnums=2)
Prefix = tuple[int, ...]


@functools.cache
def distribution(seed: int, prefix: Prefix, zeros: int = 0) -> np.ndarray:
    """The distribution f64[V] after a prefix, `zeros` of its tokens impossible."""
    rng = np.random.default_rng([seed, zeros, len(prefix), *prefix])
    p = rng.dirichlet(np.full(VOCAB, 0.7)) + 0.02
    p[rng.permutation(VOCAB)[:zeros]] = 0
    return p / p.sum()


def assert_plain(mass: dict[Prefix, float], p_of: Any, tolerance: float) -> None:
    """Emitted prefixes with their probabilities, continued plainly, have the plain distribution."""
    mass = dict(mass)
    assert sum(mass.values()) == pytest.approx(1, abs=tolerance)
    for length in range(DEPTH + 1):
        for prefix in [e for e in mass if len(e) == length]:
            whole = mass.pop(prefix)
            for v in range(VOCAB):
                mass[*prefix, v] = mass.get((*prefix, v), 0.0) + whole * p_of(prefix)[v]
    for sequence in itertools.product(range(VOCAB), repeat=DEPTH + 1):
        want = np.prod([p_of(sequence[:i])[v] for i, v in enumerate(sequence)])
        assert mass.get(sequence, 0.0) == pytest.approx(want, abs=tolerance)


def shapes() -> Iterator[tuple[int, ...]]:
    """The parents of every tree of five nodes."""
    yield from itertools.product([0], [0], range(2), range(3), range(4))


def ranks(parent: tuple[int, ...]) -> list[int]:
    return [sum(parent[j] == p for j in range(1, i)) if i else 0 for i, p in enumerate(parent)]


def prefixes(parent: tuple[int, ...], tokens: list[int]) -> list[Prefix]:
    """Each node's tokens from below the root to itself."""
    actual: list[Prefix] = [()]
    for i in range(1, len(parent)):
        actual.append((*actual[parent[i]], tokens[i]))
    return actual


def independent(distributions: list[np.ndarray], levels: list[int]
                ) -> tuple[np.ndarray, np.ndarray]:
    """Every draw at every node i[R, n], with the probabilities of independent draws f64[R]."""
    drawn = np.asarray(list(itertools.product(range(VOCAB), repeat=len(distributions))))
    return drawn, np.prod([p[drawn[:, i]] for i, p in enumerate(distributions)], 0)


def shared(distributions: list[np.ndarray], levels: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """As match draws: nodes of one level share their noise, here one uniform, by inversion."""
    groups = []
    for level in range(max(levels) + 1):
        nodes = [i for i, at in enumerate(levels) if at == level]
        ends = {i: np.append(np.cumsum(distributions[i])[:-1], 1.0) for i in nodes}
        cuts = np.unique(np.concatenate([[0.0], *ends.values()]))
        groups.append([(high - low, {i: int(np.searchsorted(ends[i], (low + high) / 2))
                                     for i in nodes}) for low, high in itertools.pairwise(cuts)])
    drawn, weight = [], []
    for parts in itertools.product(*groups):
        merged = dict(pair for _, part in parts for pair in part.items())
        drawn.append([merged[i] for i in range(len(distributions))])
        weight.append(np.prod([size for size, _ in parts]))
    return np.asarray(drawn), np.asarray(weight)


@pytest.mark.parametrize("coupling", [independent, shared], ids=lambda f: f.__name__)
def test_match_emits_the_plain_distribution(coupling: Any) -> None:
    """Every tree of five nodes, also with its last leaf dead; every draw with its probability.

    What is emitted ends where the tree does, which the emitted tokens alone decide, so each
    emitted sequence must have its own plain probability, not only the distribution as a whole.
    """
    cases, rows = [], []
    for parent, dead in itertools.product(shapes(), (False, True)):
        tokens = [(r + p) % VOCAB for r, p in zip(ranks(parent), parent, strict=True)]
        names = prefixes(parent, tokens)
        drawn, weight = coupling([distribution(1, name, zeros=len(name) % 2) for name in names],
                                 [len(name) for name in names])
        cases.append((names[: NODES - dead], weight))
        live = np.arange(NODES) < NODES - dead
        level = [len(name) for name in names]
        rows.append([np.tile(a, (len(drawn), 1)) for a in (
            tokens, parent, level, ranks(parent), live)] + [drawn])
    joined = [np.concatenate(column) for column in zip(*rows, strict=True)]
    joined = [a if a.dtype == bool else a.astype(np.int32) for a in joined]
    *nodes, drawn = joined
    _, emitted, count = map(np.asarray, WALK(Nodes(*nodes), drawn, DEPTH))
    start = 0
    for names, weight in cases:
        part = slice(start, start := start + len(weight))
        mass: dict[Prefix, float] = {}
        for said, length, w in zip(emitted[part].tolist(), count[part].tolist(), weight,
                                   strict=True):
            key = tuple(said[:length])
            mass[key] = mass.get(key, 0.0) + w
        assert {e for e in mass} <= {(*n, v) for n in names for v in range(VOCAB)} - set(names)
        for e, probability in mass.items():
            want = np.prod([distribution(1, e[:i], zeros=i % 2)[v] for i, v in enumerate(e)])
            assert probability == pytest.approx(want, abs=1e-12)
        assert sum(mass.values()) == pytest.approx(1, abs=1e-12)


# Rejection. A branch is one course of a walk: its probability is known in closed form.


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A tree as the drafter drew it, and the probability of that draw."""

    parent: tuple[int, ...]
    tokens: tuple[int, ...]
    weight: float
    p: tuple[np.ndarray, ...]  # f64[V] at each node
    q: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Branch:
    probability: float
    tests: tuple[tuple[int, int, float, bool], ...]  # level, tries, chance, accepted
    path: tuple[int, ...]
    left: np.ndarray  # f64[V] the distribution of the last token


def drawings(parent: tuple[int, ...], p_of: Any, q_of: Any) -> list[Drawn]:
    """All trees of a shape: siblings from q without replacement, then, q being used up, by id."""
    partial: list[tuple[list[int], float]] = [([0], 1.0)]
    for i in range(1, len(parent)):
        longer = []
        for tokens, weight in partial:
            q = q_of(prefixes(parent[:i], tokens)[parent[i]])
            taken = [tokens[j] for j in range(1, i) if parent[j] == parent[i]]
            rest = np.where(np.isin(np.arange(VOCAB), taken), 0, q)
            if rest.sum() > 0:
                longer += [([*tokens, v], weight * rest[v] / rest.sum())
                           for v in range(VOCAB) if rest[v] > 0]
            else:
                free = min(set(range(VOCAB)) - set(taken))
                longer.append(([*tokens, free], weight))
        partial = longer
    return [Drawn(parent, tuple(tokens), weight,
                  *(tuple(map(of, prefixes(parent, tokens))) for of in (p_of, q_of)))
            for tokens, weight in partial]


def branches(tree: Drawn, node: int = 0, level: int = 0) -> Iterator[Branch]:
    """Every course from a node on, by the textbook: min(1, p / q), norm(max(p - q, 0))."""
    p, q, reached = tree.p[node], tree.q[node], 1.0
    tests: tuple[tuple[int, int, float, bool], ...] = ()
    for tries, child in enumerate(i for i in range(1, NODES) if tree.parent[i] == node):
        token = tree.tokens[child]
        proposal = q if q[token] > 0 else np.eye(VOCAB)[token]
        chance = min(1.0, p[token] / proposal[token])
        for b in branches(tree, child, level + 1) if chance > 0 else ():
            yield Branch(reached * chance * b.probability,
                         (*tests, (level, tries, chance, True), *b.tests), (node, *b.path), b.left)
        if chance >= 1 - 1e-12:
            return
        tests, reached = (*tests, (level, tries, chance, False)), reached * (1 - chance)
        p = np.maximum(p - proposal, 0) / np.maximum(p - proposal, 0).sum()
        q = np.where(np.arange(VOCAB) == token, 0, q)
        q = q / q.sum() if q.sum() > 0 else q
    yield Branch(reached, tests, (node,), p)


def coins_of(branch: Branch, margin: float = 1e-4) -> np.ndarray:
    """f32[D+1, n]: coins just on the branch's side of every threshold; NaN where none is used."""
    coins = np.full((DEPTH + 1, NODES), np.nan, np.float32)
    for level, tries, chance, accepted in branch.tests:
        coins[level, tries] = (chance * (1 - margin) if accepted
                               else chance + (1 - chance) * margin)
    return coins


@functools.partial(jax.jit, static_argnums=4)
def decided(nodes: Nodes, p: Any, q: Any, coins: Any, depth: int) -> Any:
    """`decide` with coins f32[B, D+1, n]."""
    def coin(level: Any, tries: Any) -> Any:
        return coins[jnp.arange(len(coins)), level, tries]

    return decide(nodes, jnp.log(p), jnp.log(q), coin, depth)


def run_decide(trees: list[Drawn], coins: list[np.ndarray], flip: bool = False) -> list[np.ndarray]:
    """path, accepted and left of every row; `flip`: the nodes are numbered otherwise."""
    parent = np.asarray([t.parent for t in trees], np.int32)
    rank = np.asarray([ranks(t.parent) for t in trees], np.int32)
    tokens = np.asarray([t.tokens for t in trees], np.int32)
    p, q = (np.asarray([getattr(t, name) for t in trees], np.float32) for name in "pq")
    order = np.asarray([0, 4, 3, 2, 1] if flip else range(NODES))
    nodes = Nodes(tokens=tokens[:, order], parent=order[parent[:, order]].astype(np.int32),
                  depth=0 * rank, rank=rank[:, order], live=np.ones_like(tokens, bool))
    path, accepted, left = map(np.asarray, decided(
        nodes, p[:, order], q[:, order], np.asarray(coins), DEPTH))
    return [order[path], accepted, left]


DISTRIBUTIONS = {"dense": (0, 0), "truncated": (1, 2), "drafter on one token": (0, 3),
        "target on one token": (3, 0)}
SHAPES = {"chain": (0, 0, 1, 2, 3), "siblings": (0, 0, 0, 0, 0), "two and one": (0, 0, 0, 1, 2),
          "two under one": (0, 0, 1, 1, 2), "two and two": (0, 0, 0, 1, 1)}


@pytest.mark.parametrize("flip", [False, True], ids=["in order", "renumbered"])
@pytest.mark.parametrize("zeros", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_rejection_emits_the_plain_distribution(zeros: tuple[int, int], flip: bool) -> None:
    """Every tree that the drafter can draw, every course of its walk.

    The coins lie within 1e-4 of the closed form's thresholds, on either side, so courses that
    agree fix every acceptance probability; with the distributions of the last token they give the
    distribution of the emitted tokens, without sampling.
    """
    def p_of(prefix: Prefix) -> np.ndarray:
        return distribution(2, prefix, zeros[0])

    def q_of(prefix: Prefix) -> np.ndarray:
        return distribution(3, prefix, zeros[1])

    courses = [(name, tree, branch) for name, parent in SHAPES.items()
               for tree in drawings(parent, p_of, q_of) for branch in branches(tree)]
    path, accepted, left = run_decide([tree for _, tree, _ in courses],
                                      [coins_of(branch) for _, _, branch in courses], flip)
    closed, jax_distribution = ({name: {} for name in SHAPES} for _ in range(2))
    for i, (name, tree, branch) in enumerate(courses):
        assert path[i, : accepted[i] + 1].tolist() == list(branch.path), (name, tree, branch)
        assert (path[i, accepted[i] :] == branch.path[-1]).all()
        np.testing.assert_allclose(left[i], branch.left, atol=3e-5)
        said = prefixes(tree.parent, list(tree.tokens))[branch.path[-1]]
        for mass, last in ((closed[name], branch.left), (jax_distribution[name], left[i])):
            for v in np.flatnonzero(last):
                more = tree.weight * branch.probability * float(last[v])
                mass[*said, int(v)] = mass.get((*said, int(v)), 0.0) + more
    for name in SHAPES:
        assert_plain(closed[name], p_of, 1e-12)
        assert_plain(jax_distribution[name], p_of, 3e-6)
