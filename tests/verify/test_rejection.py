"""The rejection rule's parts: its distributions, coins, verdicts; what must not matter does not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from distribution_checks import SETTINGS, TREE, distribution, keys

from specrl_jax.prng import bits
from specrl_jax.structs import Frontier, Sampling
from specrl_jax.verify import rejection, sampling
from specrl_jax.verify.protocol import Nodes, Target
from specrl_jax.verify.rejection import Noise

VOCAB, ROWS, DEPTH = 12, 64, 2
NODES = len(TREE.parent)
JUDGE = jax.jit(rejection.judge, static_argnums=4)
WALK = jax.jit(rejection.walk, static_argnums=4)
PROCESS = jax.jit(sampling.process)
def packed(rng: np.random.Generator) -> tuple[Any, ...]:
    """Logits [V, W] in which every setting occurs, and the settings f32[W], i32[W], f32[W]."""
    logits = rng.normal(size=(VOCAB, ROWS * NODES)).astype(np.float32) * 2
    temperature, top_k, top_p = SETTINGS[np.arange(ROWS * NODES) % len(SETTINGS)].T
    return logits, temperature, top_k.astype(np.int32), top_p


def test_process_gives_the_distribution_of_the_draw() -> None:
    args = packed(np.random.default_rng(0))
    logp = np.asarray(PROCESS(*args).logp, np.float64)
    for w in range(logp.shape[0]):
        want = distribution(args[0][:, w], *SETTINGS[w % len(SETTINGS)])
        np.testing.assert_allclose(np.exp(logp[w]), want, atol=2e-6)
        assert ((np.exp(logp[w]) == 0) == (want == 0)).all()


def trees(rng: np.random.Generator) -> Nodes:
    """Nodes [ROWS, NODES]; siblings differ."""
    tokens = np.stack([rng.permutation(VOCAB)[:NODES] for _ in range(ROWS)]).astype(np.int32)
    parent, rank, depth = (np.tile(np.asarray(a, np.int32), (ROWS, 1))
                           for a in (TREE.parent, TREE.rank, TREE.depth))
    live = rng.random((ROWS, NODES)) < 0.8
    live[:, 0] = True
    live &= np.take_along_axis(live, parent, 1)
    return Nodes(tokens=tokens, parent=parent, depth=depth, rank=rank, live=live)


def distributions(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """logp, logq f32[ROWS, NODES, VOCAB]; similar, so that paths are long."""
    logits = rng.normal(size=(ROWS, NODES, VOCAB))
    return tuple(np.asarray(jax.nn.log_softmax(x)) for x in (
        logits, logits + 0.3 * rng.normal(size=logits.shape)))


def judged(stop: int = -1, limit: int = 100, dead: int = 0) -> tuple[Any, Any, Any]:
    """The verdict of ROWS random trees, the first `dead` of them not live; target and place."""
    rng = np.random.default_rng(2)
    tree = trees(rng)
    logits, *_ = packed(rng)
    row = np.arange(ROWS * NODES) // NODES
    settings = [np.asarray(a, d)[row] for a, d in zip(
        SETTINGS[np.arange(ROWS) % len(SETTINGS)].T, (np.float32, np.int32, np.float32),
        strict=True)]
    target = PROCESS(logits, *settings)
    place = np.arange(ROWS * NODES).reshape(ROWS, NODES)
    logq = target.logp[place] + 0.2 * rng.normal(size=(ROWS, NODES, VOCAB))
    index = jnp.arange(ROWS)
    frontier = Frontier(root=tree.tokens[:, 0], seq=index, generated=index % 7, context=index,
                        live=index >= dead)
    options = Sampling(temperature=settings[0], top_p=settings[2], top_k=settings[1],
                       limit=index % 7 + limit, key=keys(ROWS, 3), stop=jnp.asarray([stop]))
    rows = Target(logits=logits, place=place, row=row, position=row, frontier=frontier,
                  sampling=options)
    verdict = JUDGE(tree, logq.astype(np.float32), target, rows, DEPTH)
    return jax.tree.map(np.asarray, verdict), target, place


def test_judge_cuts_stop_limit_and_dead_rows_as_match() -> None:
    free, *_ = judged()
    stop = int(free.tokens[free.count == 3][0, 1])
    stopped, *_ = judged(stop=stop)
    hits = [np.flatnonzero(t[:c] == stop) for t, c in zip(free.tokens, free.count, strict=True)]
    want = [h[0] + 1 if len(h) else c for h, c in zip(hits, free.count, strict=True)]
    assert stopped.count.tolist() == want
    assert stopped.stopped.tolist() == [len(h) > 0 for h in hits]
    limited, *_ = judged(limit=2, dead=5)
    assert limited.count.tolist() == [0] * 5 + np.minimum(free.count, 2)[5:].tolist()
    assert limited.stopped.tolist() == [False] * 5 + (free.count >= 2)[5:].tolist()


def test_walk_ignores_dead_nodes_and_their_numbering() -> None:
    rng = np.random.default_rng(4)
    tree = trees(rng)
    logp, logq = distributions(rng)
    rest = (Noise(keys(ROWS, 5), np.arange(ROWS, dtype=np.int32)), DEPTH)
    path, emitted, count = map(np.asarray, WALK(tree, logp, logq, *rest))
    assert set(count) == {1, 2, 3}
    dirty = jax.tree.map(lambda a: np.where(tree.live, a, 7), tree).replace(live=tree.live)
    again = WALK(dirty, *(np.where(tree.live[..., None], a, np.nan) for a in (logp, logq)), *rest)
    for one, other in zip((path, emitted, count), again, strict=True):
        np.testing.assert_array_equal(one, other)
    order = np.asarray([0, 2, 1, 4, 3])  # siblings swap indices, ranks do not
    renumbered = tree.replace(parent=np.argsort(order).astype(np.int32)[tree.parent])
    moved = jax.tree.map(lambda a: a[:, order], (renumbered, logp, logq))
    path_, emitted_, count_ = map(np.asarray, WALK(*moved, *rest))
    np.testing.assert_array_equal(order[path_], path)
    np.testing.assert_array_equal(emitted_, emitted)
    np.testing.assert_array_equal(count_, count)


def test_coins_residuals_and_draft_noise_are_independent() -> None:
    """Their indices are disjoint, and their words uncorrelated over keys and positions."""
    largest_vocabulary, most_nodes = 2**22, 2**20
    assert largest_vocabulary < rejection.COINS < rejection.COINS + most_nodes < rejection.RESIDUAL
    assert rejection.RESIDUAL + largest_vocabulary < 2**32
    count = 2**15
    key, position = keys(count, 8), np.arange(count, dtype=np.int32) % 50
    index = np.concatenate([np.arange(4), [rejection.COINS], [rejection.COINS + 1],
                            rejection.RESIDUAL + np.arange(4)]).astype(np.uint32)
    word = np.asarray(bits(key, position, index), np.float64)
    level, tries = np.zeros(count, np.int32), np.ones(count, np.int32)
    coins = np.asarray(rejection.coin(Noise(key, position - 3), level + 3, tries), np.float64)
    np.testing.assert_allclose(coins, word[:, 5] / 2**32, atol=1e-6)
    correlation = np.corrcoef(word.T) - np.eye(len(index))
    assert np.abs(correlation).max() < 5 / count**0.5
