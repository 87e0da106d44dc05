"""The match rule equals its reference in plain Python, also at stop tokens, limits, dead rows."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_checks import SETTINGS, ProcessedDistribution, keys

from specrl_jax.prng import gumbel
from specrl_jax.structs import Frontier, Sampling
from specrl_jax.verify import match, reference
from specrl_jax.verify.protocol import Nodes, Target

ROWS, NODES, DEPTH, VOCAB = 260, 7, 4, 5
VERIFY = jax.jit(match.verify, static_argnums=2)
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


@pytest.mark.parametrize("stop", [(3, -1), (3, 1), (-1, -1)], ids=str)
def test_match_equals_its_reference(stop: tuple[int, ...]) -> None:
    """With every setting of sampling and limits from one token on; every 13th row is dead."""
    seed = 2 + sum(stop)
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
                          live=index % 13 > 0),
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k.astype(np.int32),
                          limit=limit, key=key, stop=np.asarray(stop))))
    verdict, drawn = jax.tree.map(np.asarray, VERIFY(nodes, target, DEPTH))
    noise = np.asarray(gumbel(key[:, None], generated[:, None] + np.arange(DEPTH + 1),
                              np.arange(VOCAB)))
    longest = 0
    for b in range(ROWS):
        def draw_after(node: int, step: int, b: int = b) -> int:
            return reference.draw(logits[:, place[b, node]], noise[b, step], float(temperature[b]),
                                  int(top_k[b]), float(top_p[b]))

        emitted, path, stopped = reference.verify(nodes.tokens[b], nodes.parent[b], nodes.live[b],
                                                  draw_after, stop, int(limit[b] - generated[b]))
        count = verdict.count[b]
        if b % 13 == 0:
            assert count == 0 and not verdict.stopped[b]
            continue
        assert verdict.tokens[b, :count].tolist() == emitted
        assert verdict.path[b, :count].tolist() == path
        assert drawn[b, path].tolist() == emitted and verdict.stopped[b] == stopped
        scores = [verdict.logprob, verdict.raw_logprob, verdict.top_p_mass]
        for step, (node, token) in enumerate(zip(path, emitted, strict=True)):
            want = ProcessedDistribution(logits[:, place[b, node]], temperature[b], int(top_k[b]),
                                         top_p[b])
            np.testing.assert_allclose([a[b, step] for a in scores], [
                want.logprob[token], want.raw[token], want.kept], rtol=0, atol=2e-5)
        longest = max(longest, count)
    assert longest >= 3
