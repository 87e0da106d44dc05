"""The draw equals a sorted float64 oracle, and its distribution is the processed distribution."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_checks import ProcessedDistribution, fits
from distribution_checks import distribution as processed
from helpers import no_device
from specrl_kernels.gumbel_argmax import xla

from specrl_jax.prng import gumbel
from specrl_jax.verify import reference, sampling, truncation


def draw(logits: Any, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, key: Any = None,
         position: Any = None) -> Any:
    """`sampling.draw` of logits [V, W]; scalars are repeated."""
    width = logits.shape[1]
    key = np.arange(2 * width).reshape(width, 2) if key is None else key
    position = np.arange(width) if position is None else position
    return DRAW(jnp.asarray(logits, jnp.float32), full(temperature, width, np.float32),
                full(top_k, width, np.int32), full(top_p, width, np.float32),
                jnp.asarray(key, jnp.uint32), jnp.asarray(position, jnp.int32))


def full(value: Any, width: int, dtype: Any) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, dtype), (width,))


DRAW = jax.jit(sampling.draw)
SETTINGS = [(t, k, p) for t in (0.0, 0.6, 1.0, 2.5) for k in (0, 1, 7, 1000) for p in
            (1.0, 0.05, 0.5, 0.95)]


@pytest.fixture(params=[(8, 4, "cpu"), (1024, 128, "cpu"), (1024, 128, "gpu")],
                ids=["chunks of 8", "one chunk", "a GPU's program"])
def chunk(request: Any, monkeypatch: Any) -> Iterator[int]:
    """A vocabulary of 37 in chunks that do not divide it, or at once.

    Boundaries of truncation lie behind the first scores that are looked at, too, or among them. A
    GPU's program finds them otherwise; a CPU runs it as well.
    """
    size, few, platform = request.param
    monkeypatch.setattr(xla, "CPU_CHUNK", size)
    monkeypatch.setattr(truncation, "FEW", few)
    DRAW.clear_cache()
    with no_device(platform):
        yield size
    DRAW.clear_cache()


def check(logits: np.ndarray, settings: list[tuple[float, int, float]]) -> None:
    """Every position against the oracle; logits [V, W] with one setting a position."""
    temperature, top_k, top_p = (np.asarray(x) for x in zip(*settings, strict=True))
    width = logits.shape[1]
    key, position = np.arange(2 * width).reshape(width, 2) + 5, np.arange(width) * 3
    got = draw(logits, temperature, top_k, top_p, key, position)
    noise = np.asarray(gumbel(jnp.asarray(key, jnp.uint32), jnp.asarray(position, jnp.int32),
                              jnp.arange(len(logits))), np.float64)
    for w, (t, k, p) in enumerate(settings):
        want = ProcessedDistribution(logits[:, w], t, k, p)
        token = int(np.argmax(want.raw if t == 0 else want.logprob + noise[w]))
        actual = f"temperature {t}, top_k {k}, top_p {p}"
        assert int(got.token[w]) == token, actual
        np.testing.assert_allclose(
            [got.logprob[w], got.raw_logprob[w], got.top_p_mass[w]],
            [want.logprob[token], want.raw[token], want.kept], rtol=0, atol=2e-5, err_msg=actual)


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_sorted_oracle(chunk: int, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(37, len(SETTINGS))) * (1 + seed)
    check(logits.astype(np.float32), SETTINGS)


def test_ties_are_kept_by_token_id(chunk: int) -> None:
    # Powers of two, so that sums are exact; 12 tokens tie at the boundary, across chunks.
    column = np.full(37, -4.0, np.float32)
    column[[2, 5, 6, 9, 13, 20, 21, 22, 30, 33, 35, 36]] = 0.0
    column[[7, 28]] = 1.0
    settings = [(1.0, k, 1.0) for k in range(1, 16)] + [(0.0, 3, 1.0), (1.0, 8, 0.99)]
    check(np.tile(column[:, None], (1, len(settings))), settings)


# The distribution. Draws are independent over rows' keys and over positions; both are used.

ROWS, POSITIONS, VOCAB = 500, 16, 12
LOGITS = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32) * 1.5


def drawn(noise_of: Callable[..., Any], temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """i[ROWS, POSITIONS] tokens of one distribution, with the noise of `noise_of`."""
    row, position = (x.reshape(-1) for x in np.meshgrid(np.arange(ROWS), np.arange(POSITIONS),
                                                        indexing="ij"))
    key = np.stack([row * 7919 + 1, row ^ 12345], 1)
    logits = np.tile(LOGITS[:, None], (1, len(row)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "exponential", lambda *at: jnp.exp(-noise_of(*at)))
        got = drawing(noise_of)(logits, full(temperature, len(row), np.float32),
                                full(top_k, len(row), np.int32), full(top_p, len(row), np.float32),
                                jnp.asarray(key, jnp.uint32), jnp.asarray(position, jnp.int32))
    return np.asarray(got.token).reshape(ROWS, POSITIONS)


@functools.cache
def drawing(noise_of: Callable[..., Any]) -> Callable[..., Any]:
    """`sampling.draw` compiled once for each noise."""
    return jax.jit(lambda *args: sampling.draw(*args))


def deviations_of(tokens: np.ndarray, p: np.ndarray) -> list[str]:
    """What is wrong with draws i[ROWS, POSITIONS] that should be independent draws from p."""
    pairs = {"positions": tokens[:, :-1] * VOCAB + tokens[:, 1:],
             "rows": tokens[:-1] * VOCAB + tokens[1:]}
    wrong = [f"neighbouring {name} depend on each other" for name, pair in pairs.items()
             if not fits(np.bincount(pair.reshape(-1), minlength=VOCAB**2), np.outer(p, p).ravel())]
    alone = fits(np.bincount(tokens.reshape(-1), minlength=VOCAB), p)
    return wrong + ([] if alone else ["the distribution"])


@pytest.mark.parametrize("top_k,top_p", [(5, 1.0), (0, 0.5), (5, 0.5)])
def test_truncation_of_nan_logits_ends(top_k: int, top_p: float) -> None:
    logits = jnp.broadcast_to(jnp.arange(8192)[:, None] / 1000, (8192, 2)).at[7, 0].set(jnp.nan)
    one = jnp.ones(2)
    args = (logits, one, jnp.full(2, top_k), one * top_p, jnp.ones((2, 2), jnp.uint32),
            jnp.arange(2))
    compiled = jax.jit(sampling.draw).lower(*args).compile()
    began = time.process_time()
    drawn = jax.block_until_ready(compiled(*args))
    assert time.process_time() - began < 3  # a bisection through all of them takes a minute
    assert drawn.top_p_mass[1] < 1  # the other row is truncated as ever


@pytest.mark.parametrize("temperature,top_k,top_p", [
    (1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.7), (0.7, 6, 0.8),
    (0.0, 0, 1.0), (0.0, 3, 0.5)])
def test_draw_has_the_processed_distribution(temperature: float, top_k: int, top_p: float) -> None:
    tokens = drawn(gumbel, temperature, top_k, top_p)
    if temperature == 0:
        assert (tokens == LOGITS.argmax()).all()
    else:
        assert deviations_of(tokens, processed(LOGITS, temperature, top_k, top_p)) == []


WRONG: dict[str, Callable[..., Any]] = {
    "without position": lambda key, position, index: gumbel(key, jnp.zeros_like(position), index),
    "one key word": lambda key, position, index: gumbel(jnp.zeros_like(key), position, index),
    "halved": lambda *at: gumbel(*at) / 2, "of the minimum": lambda *at: -gumbel(*at),
    "same for pairs": lambda key, position, index: gumbel(key, position, index // 2)}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_noise_is_noticed(wrong: str) -> None:
    assert deviations_of(drawn(WRONG[wrong], 1.0, 0, 1.0), processed(LOGITS, 1.0, 0, 1.0))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("min_p, top_k, top_p", [
    (0.3, 0, 1.0), (0.05, 7, 0.9), (0.9, 3, 0.5), (1e-9, 0, 1.0), (1.0, 0, 1.0)])
def test_min_p_draws_and_weighs_what_the_reference_keeps(
        platform: str, min_p: float, top_k: int, top_p: float) -> None:
    width, vocab = 40, 37
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(vocab, width)).astype(np.float32) * 2
    heat, key = np.full(width, 0.8, np.float32), np.arange(2 * width).reshape(width, 2)
    position = np.arange(width)
    with no_device(platform):
        actual = jax.jit(functools.partial(sampling.draw, min_p=min_p))(
            logits, heat, full(top_k, width, np.int32), full(top_p, width, np.float32),
            jnp.asarray(key, jnp.uint32), position)
    noise = np.asarray(gumbel(jnp.asarray(key, jnp.uint32), position, jnp.arange(vocab)))
    for i in range(width):
        assert actual.token[i] == reference.draw(logits[:, i], noise[i], 0.8, top_k, top_p, min_p)
    mass = np.exp((logits - logits.max(0)) / np.float32(0.8))
    if top_k == 0 and top_p == 1:
        np.testing.assert_allclose(actual.top_p_mass, np.where(mass >= min_p, mass, 0).sum(0)
                                   / mass.sum(0), rtol=1e-5)
