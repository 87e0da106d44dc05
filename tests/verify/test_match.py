"""The match rule equals its reference in plain Python; stop and limit; dead rows."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_checks import SETTINGS, keys

from specrl_jax.prng import gumbel
from specrl_jax.structs import Frontier, Sampling
from specrl_jax.verify import match, reference
from specrl_jax.verify.protocol import Nodes, Target
from specrl_jax.verify.sampling import Draw

ROWS, NODES, DEPTH, VOCAB = 260, 7, 4, 5
VERIFY = jax.jit(match.verify, static_argnums=2)
WALK = jax.jit(match.walk, static_argnums=2)
JUDGE = jax.jit(match.judge, static_argnums=3)


def test_walk_of_every_small_tree_equals_plain_python() -> None:
    """Every tree shape of four nodes, every draw from three tokens; ranks and depths are unread."""
    shapes = list(itertools.product([0], [0], [0, 1], [0, 1, 2]))
    drawn = np.asarray(list(itertools.product(range(3), repeat=4)), np.int32)
    total = 0
    for shape, alive in itertools.product(shapes, [(1, 1, 1, 1), (1, 1, 1, 0), (1, 1, 0, 1)]):
        parent = np.asarray(shape, np.int32)
        live = np.asarray(alive, bool)
        live &= live[parent]
        tokens = np.asarray([2, 0, 1, 2], np.int32)  # siblings differ whatever the shape
        rows = [np.tile(a, (len(drawn), 1)) for a in (tokens, parent, parent * 0, parent * 0, live)]
        path, emitted, count = map(np.asarray, WALK(Nodes(*rows), drawn, 3))
        for b, draw in enumerate(drawn):
            said, nodes, _ = reference.verify(tokens, parent, live, lambda node, at, draw=draw: int(
                draw[node]), (), 9)
            assert (emitted[b, : count[b]].tolist(), path[b, : count[b]].tolist()) == (said, nodes)
        total += len(drawn)
    assert total == 6 * 3 * 81


def judged(drawn: list[int], *, generated: int = 0, limit: int = 100, stop: tuple[int, ...] = (-1,),
           live: bool = True) -> Any:
    """The verdict of one row whose chain 0 -> 1 -> 2 -> 3 holds tokens 5, 6, 7."""
    place = jnp.arange(4)[None]
    tokens = jnp.asarray([[9, 5, 6, 7]])
    draw = Draw(token=jnp.asarray(drawn), logprob=-jnp.arange(4.0),
                raw_logprob=-10 - jnp.arange(4.0), top_p_mass=1 / (1 + jnp.arange(4.0)))
    frontier = Frontier(root=jnp.asarray([9]), seq=jnp.asarray([0]), context=jnp.asarray([3]),
                        generated=jnp.asarray([generated]), live=jnp.asarray([live]))
    sampling = Sampling(temperature=jnp.ones(1), top_p=jnp.ones(1), top_k=jnp.zeros(1, jnp.int32),
                        limit=jnp.asarray([limit]), key=jnp.zeros((1, 2), jnp.uint32),
                        stop=jnp.asarray(stop))
    nodes = Nodes(tokens, jnp.asarray([[0, 0, 1, 2]]), place, place, jnp.full((1, 4), live))
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


@pytest.mark.parametrize("drawn, row, count, stopped", [
    ([5, 4, 7, 8], {}, 2, False), ([5, 6, 7, 8], {"stop": (5,)}, 1, True),
    ([5, 6, 7, 8], {"stop": (7, 6)}, 2, True), ([5, 6, 7, 8], {"stop": (8,)}, 4, True),
    ([5, 6, 7, 8], {"stop": (4,)}, 4, False), ([4, 6, 7, 8], {"stop": (6, 7, 8)}, 1, False),
    *(([5, 6, 7, 8], {"generated": 10, "limit": 10 + n}, min(n, 4), n <= 4) for n in range(1, 6)),
    ([5, 6, 7, 8], {"limit": 2, "stop": (7,)}, 2, True),
    ([5, 6, 7, 8], {"stop": (5,), "live": False}, 0, False)])
def test_judge_cuts_at_a_miss_a_stop_token_and_the_limit(
        drawn: list[int], row: dict[str, Any], count: int, stopped: bool) -> None:
    verdict = judged(drawn, **row)
    assert verdict.count == count and verdict.stopped == stopped


def random_nodes(rng: np.random.Generator) -> Nodes:
    """Siblings hold different tokens; dead nodes lie in between; parents come first."""
    parent, depth = (np.zeros((ROWS, NODES), np.int32) for _ in range(2))
    tokens = rng.integers(0, VOCAB, (ROWS, NODES)).astype(np.int32)
    live = np.ones((ROWS, NODES), bool)
    for b, n in np.ndindex(ROWS, NODES):
        if n:
            parent[b, n] = rng.integers(0, n)
            depth[b, n] = depth[b, parent[b, n]] + 1
            twins = [m for m in range(1, n) if live[b, m] and parent[b, m] == parent[b, n]
                     and tokens[b, m] == tokens[b, n]]
            fits = not twins and depth[b, n] <= DEPTH
            live[b, n] = live[b, parent[b, n]] and fits and rng.random() < 0.9
    return Nodes(tokens=tokens, parent=parent, depth=depth, rank=0 * depth, live=live)


@pytest.mark.parametrize("seed", range(3))
def test_match_equals_its_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, key = random_nodes(rng), keys(ROWS, seed)
    temperature, top_k, top_p = SETTINGS[np.arange(ROWS) % len(SETTINGS)].T
    generated = rng.integers(0, 50, ROWS).astype(np.int32)
    limit = generated + rng.integers(1, DEPTH + 3, ROWS).astype(np.int32)
    row = np.arange(ROWS * NODES) // NODES
    logits = rng.normal(size=(VOCAB, ROWS * NODES)).astype(np.float32)
    place = np.arange(ROWS * NODES).reshape(ROWS, NODES)
    index = np.arange(ROWS)
    target = jax.tree.map(jnp.asarray, Target(
        logits=logits, place=place, row=row,
        position=(generated[:, None] + nodes.depth).reshape(-1),
        frontier=Frontier(root=nodes.tokens[:, 0], seq=index, generated=generated, context=index,
                          live=index >= 0),
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k.astype(np.int32),
                          limit=limit, key=key, stop=np.asarray([3, -1]))))
    verdict, drawn = jax.tree.map(np.asarray, VERIFY(nodes, target, DEPTH))
    noise = np.asarray(gumbel(key[:, None], generated[:, None] + np.arange(DEPTH + 1),
                              np.arange(VOCAB)))
    longest = 0
    for b in range(ROWS):
        def draw_after(node: int, step: int, b: int = b) -> int:
            return reference.draw(logits[:, place[b, node]], noise[b, step], float(temperature[b]),
                                  int(top_k[b]), float(top_p[b]))

        emitted, path, stopped = reference.verify(nodes.tokens[b], nodes.parent[b], nodes.live[b],
                                                  draw_after, {3}, int(limit[b] - generated[b]))
        count = verdict.count[b]
        assert verdict.tokens[b, :count].tolist() == emitted
        assert verdict.path[b, :count].tolist() == path
        assert drawn[b, path].tolist() == emitted and verdict.stopped[b] == stopped
        longest = max(longest, count)
    assert longest >= 3
