"""argmax(logp + G) by chi-square, over temperature x truncation; tokens of p = 1e-7 and 1e-8.

Real vocabularies span several of the draw's chunks and orders of magnitude of probability: here
5000 tokens (two chunks that overlap), as Zipf has them, at ids in random order. Small vocabularies
and independence are in test_sampling.py, the noise alone in test_noise.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_checks import distribution, fits, keys
from specrl_kernels import noise

from specrl_jax.verify import sampling

DRAW = jax.jit(sampling.draw)
VOCAB, DRAWS = 5000, 1024
LOGITS = np.random.default_rng(0).permutation(
    -1.1 * np.log(np.arange(VOCAB) + 2.0)).astype(np.float32)


def draw(logits: np.ndarray, setting: tuple[float, int, float], key: np.ndarray,
         position: np.ndarray) -> np.ndarray:
    """Tokens i32[W] of logits [V, W] with one setting."""
    temperature, top_k, top_p = (np.full(len(key), value, dtype) for value, dtype in zip(
        setting, (np.float32, np.int32, np.float32), strict=True))
    return np.asarray(DRAW(logits, temperature, top_k, top_p, key, position).token)


def tokens(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """i32[DRAWS]."""
    logits = np.broadcast_to(LOGITS[:, None], (VOCAB, DRAWS))
    return draw(logits, (temperature, top_k, top_p), keys(DRAWS, 1),
                np.arange(DRAWS, dtype=np.int32))


def has_distribution(drawn: np.ndarray, p: np.ndarray) -> bool:
    """Tests for the distribution p, token by token at its head, then in classes of equal mass."""
    order = np.argsort(-p, kind="stable")
    head, tail = order[:20], order[20:]
    by_mass = tail[p[tail] > 0]
    classes = np.minimum((np.cumsum(p[by_mass]) / p[by_mass].sum() * 20).astype(int), 19)
    cell = np.full(VOCAB, 40)
    cell[head], cell[by_mass] = np.arange(20), 20 + classes
    cell[p == 0] = 40
    return fits(np.bincount(cell[drawn], minlength=41), np.bincount(cell, p, minlength=41))


@pytest.mark.parametrize("setting", [
    (0.5, 0, 1.0), (1.0, 0, 1.0), (1.5, 0, 1.0), (1.0, 500, 1.0), (1.5, 0, 0.9), (0.7, 2000, 0.8)])
def test_the_distribution_over_a_long_tail(setting: tuple[float, int, float]) -> None:
    temperature, top_k, top_p = setting
    drawn = tokens(*setting)
    assert has_distribution(drawn, distribution(LOGITS, *setting))
    for wrong in ((1.4 * temperature, top_k, top_p), (temperature, 3, top_p),
                  (temperature, top_k, 0.5 * top_p)):
        assert not has_distribution(drawn, distribution(LOGITS, *wrong)), wrong


# A token of probability p wins where the noise's word is below about p 2^32, which a scan over
# words finds; only there is it worth drawing. Nowhere else could it win: the common token's
# exponential would have to exceed 40, and e^-40 is never seen.

RARE, SCAN, BLOCK, LOW = 64, 2**26, 2**18, int(40e-7 * 2**32)


@functools.cache
def low_words() -> np.ndarray:
    """u32[hits, 4] key (2 words), token, noise word: where words are below LOW in SCAN rows."""
    @jax.jit
    def lowest(row: jax.Array) -> jax.Array:
        def body(token: jax.Array, low: jax.Array) -> jax.Array:
            return jnp.minimum(low, words(row, token[None])[:, 0])

        return jax.lax.fori_loop(1, RARE, body, jnp.full(BLOCK, 2**32 - 1, jnp.uint32))

    rows = np.arange(SCAN, dtype=np.uint32).reshape(-1, BLOCK)
    row = np.concatenate([block[np.asarray(lowest(block)) < LOW] for block in rows])
    word = np.asarray(words(row, np.arange(1, RARE)))
    at, token = np.nonzero(word < LOW)
    return np.stack([row[at], row[at] * 0 + 77, token + 1, word[at, token]], 1).astype(np.uint32)


def words(row: jax.Array, token: jax.Array) -> jax.Array:
    """u32[rows, tokens]: the noise's words under each row's key at position 0."""
    key = jnp.stack([row, jnp.full_like(row, 77)], 1)
    return noise.bits(key, jnp.zeros(len(row), jnp.int32), token)


@pytest.mark.ci
@pytest.mark.parametrize("p", [1e-7, 1e-8])
def test_rare_tokens_are_drawn(p: float) -> None:
    """Tokens 1 to 63 in turn have probability p, token 0 the rest: four thousand million draws.

    With 24 bits at the winning end, tokens below about 1e-7 are drawn too rarely, or never.
    """
    hits = low_words()
    hits = hits[hits[:, 3] < 40 * p * 2**32]
    logits = np.full((RARE, len(hits)), -np.inf, np.float32)
    logits[0], logits[hits[:, 2], np.arange(len(hits))] = np.log1p(-p), np.log(p)
    drawn = draw(logits, (1.0, 0, 1.0), hits[:, :2], np.zeros(len(hits), np.int32))
    won, expected = (drawn > 0).sum(), p * SCAN * (RARE - 1)
    assert (drawn[drawn > 0] == hits[drawn > 0, 2]).all()
    assert abs(won - expected) < 3.5 * expected**0.5
