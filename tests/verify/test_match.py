"""The walk, against one written in plain Python; stop and limit; dead rows."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.structs import Frontier, Sampling
from specrl_jax.verify.match import judge, walk
from specrl_jax.verify.protocol import Nodes, Target
from specrl_jax.verify.sampling import Draw

WALK = jax.jit(walk, static_argnums=2)
JUDGE = jax.jit(judge, static_argnums=3)


def plain_walk(tokens: Any, parent: Any, live: Any, drawn: Any, depth: int
               ) -> tuple[list[int], list[int]]:
    """(nodes walked, tokens emitted) of one row."""
    at, nodes, emitted = 0, [0], [int(drawn[0])]
    while len(emitted) <= depth:
        child = [i for i in range(1, len(tokens))
                 if live[i] and parent[i] == at and tokens[i] == emitted[-1]]
        if not child:
            break
        at, = child
        nodes.append(at)
        emitted.append(int(drawn[at]))
    return nodes, emitted


def random_trees(count: int, nodes: int, vocab: int, seed: int) -> tuple[np.ndarray, ...]:
    """tokens, parent, live [count, nodes]: siblings differ, the live are closed under parent."""
    rng = np.random.default_rng(seed)
    parent = np.zeros((count, nodes), np.int32)
    tokens = rng.integers(0, vocab, (count, nodes)).astype(np.int32)
    live = np.ones((count, nodes), bool)
    for b, n in itertools.product(range(count), range(1, nodes)):
        parent[b, n] = rng.integers(0, n)
        twins = [i for i in range(1, n) if live[b, i] and parent[b, i] == parent[b, n]
                 and tokens[b, i] == tokens[b, n]]
        live[b, n] = live[b, parent[b, n]] and not twins and rng.random() < 0.9
    return tokens, parent, live


def nodes_of(tokens: Any, parent: Any, live: Any) -> Nodes:
    """The walk reads neither ranks nor depths."""
    unread = np.full_like(parent, 9)
    return Nodes(tokens=tokens, parent=parent, depth=unread, rank=unread, live=live)


def assert_walks(tokens: Any, parent: Any, live: Any, drawn: Any, depth: int) -> int:
    """Compares all rows; returns the longest path."""
    nodes = nodes_of(tokens, parent, live)
    path, emitted, count = map(np.asarray, WALK(nodes, drawn, depth))
    longest = 0
    for b in range(len(tokens)):
        path_of, said = plain_walk(tokens[b], parent[b], live[b], drawn[b], depth)
        assert count[b] == len(said)
        assert path[b, : len(path_of)].tolist() == path_of
        assert emitted[b, : len(said)].tolist() == said
        longest = max(longest, len(said))
    return longest


@pytest.mark.parametrize("nodes,depth", [(1, 0), (4, 3), (7, 2), (9, 8)])
def test_walk_of_random_trees_equals_plain_python(nodes: int, depth: int) -> None:
    tokens, parent, live = random_trees(400, nodes, 2, nodes)
    drawn = np.random.default_rng(9).integers(0, 2, tokens.shape).astype(np.int32)
    assert assert_walks(tokens, parent, live, drawn, depth) >= min(nodes, depth + 1, 5)


def test_walk_of_every_small_tree_equals_plain_python() -> None:
    """Every tree shape of four nodes, every draw from three tokens."""
    shapes = list(itertools.product([0], [0], [0, 1], [0, 1, 2]))
    drawn = np.asarray(list(itertools.product(range(3), repeat=4)), np.int32)
    total = 0
    for shape, alive in itertools.product(shapes, [(1, 1, 1, 1), (1, 1, 1, 0), (1, 1, 0, 1)]):
        parent = np.asarray(shape, np.int32)
        live = np.asarray(alive, bool)
        live &= live[parent]
        tokens = np.asarray([2, 0, 1, 2], np.int32)  # siblings differ whatever the shape
        rows = [np.tile(a, (len(drawn), 1)) for a in (tokens, parent, live)]
        assert_walks(*rows, drawn, 3)
        total += len(drawn)
    assert total == 6 * 3 * 81


def judged(drawn: list[int], *, generated: int = 0, limit: int = 100, stop: tuple[int, ...] = (-1,),
           live: bool = True) -> Any:
    """The verdict of one row whose chain 0 -> 1 -> 2 -> 3 holds tokens 5, 6, 7."""
    place = jnp.arange(4)[None]
    tokens = jnp.asarray([[9, 5, 6, 7]])
    draw = Draw(token=jnp.asarray(drawn), logprob=-jnp.arange(4.0),
                raw_logprob=-10 - jnp.arange(4.0), top_p_mass=1 / (1 + jnp.arange(4.0)))
    frontier = Frontier(
        root=jnp.asarray([9]),
        seq=jnp.asarray([0]),
        generated=jnp.asarray([generated]),
        context=jnp.asarray([3]),
        live=jnp.asarray([live]),
    )
    sampling = Sampling(temperature=jnp.ones(1), top_p=jnp.ones(1), top_k=jnp.zeros(1, jnp.int32),
                        limit=jnp.asarray([limit]), key=jnp.zeros((1, 2), jnp.uint32),
                        stop=jnp.asarray(stop))
    nodes = nodes_of(tokens, jnp.asarray([[0, 0, 1, 2]]), jnp.full((1, 4), live))
    target = Target(logits=jnp.zeros((10, 4)), place=place, row=place[0], position=place[0],
                    frontier=frontier, sampling=sampling)
    verdict = JUDGE(nodes, draw, target, 3)
    return jax.tree.map(lambda a: np.asarray(a)[0], verdict)


def test_judge_emits_the_whole_path_and_one_more_token() -> None:
    verdict = judged([5, 6, 7, 8])
    assert verdict.count == 4 and not verdict.stopped
    assert verdict.tokens.tolist() == [5, 6, 7, 8]
    assert verdict.path.tolist() == [0, 1, 2, 3]
    assert verdict.logprob.tolist() == [0, -1, -2, -3]
    assert verdict.raw_logprob.tolist() == [-10, -11, -12, -13]
    np.testing.assert_allclose(verdict.top_p_mass, [1, 1 / 2, 1 / 3, 1 / 4])


def test_judge_ends_the_path_at_a_miss() -> None:
    verdict = judged([5, 4, 7, 8])
    assert verdict.count == 2 and verdict.tokens[:2].tolist() == [5, 4]
    assert verdict.logprob[:2].tolist() == [0, -1]


@pytest.mark.parametrize("stop,count", [((5,), 1), ((6,), 2), ((7, 6), 2), ((8,), 4), ((4,), 4)])
def test_judge_cuts_after_a_stop_token_inside_the_path(stop: tuple[int, ...], count: int) -> None:
    verdict = judged([5, 6, 7, 8], stop=stop)
    assert verdict.count == count and verdict.stopped == (stop != (4,))


def test_judge_ignores_a_stop_token_beyond_the_path() -> None:
    verdict = judged([4, 6, 7, 8], stop=(6, 7, 8))
    assert verdict.count == 1 and not verdict.stopped


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_judge_cuts_at_a_limit_inside_the_path(limit: int) -> None:
    verdict = judged([5, 6, 7, 8], generated=10, limit=10 + limit)
    assert verdict.count == min(limit, 4) and verdict.stopped == (limit <= 4)


def test_judge_cuts_at_a_limit_before_the_stop_token() -> None:
    verdict = judged([5, 6, 7, 8], limit=2, stop=(7,))
    assert verdict.count == 2 and verdict.stopped


def test_judge_commits_nothing_in_a_dead_row() -> None:
    verdict = judged([5, 6, 7, 8], stop=(5,), live=False)
    assert verdict.count == 0 and not verdict.stopped
