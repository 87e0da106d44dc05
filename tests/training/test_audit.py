"""Teacher-forced rulings against the plain formula, written out token by token."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_arch, tiny_params

from specrl_jax import prng
from specrl_jax.config import RolloutConfig
from specrl_jax.evaluation.compare import Difference
from specrl_jax.model import transformer
from specrl_jax.training import audit

ARCH = tiny_arch()
PARAMS = tiny_params(ARCH)
SEED, STEP = 3, 2


def encode(text):
    return [ord(c) - ord("a") for c in text]


def noisy(prompt, before, key, temperature=1.0):
    """Perturbed scores f32[V] of the next token, without replay.py."""
    tokens = jnp.asarray([encode(prompt) + before])
    logits = transformer.forward(ARCH, PARAMS, tokens, jnp.asarray([tokens.shape[1]]))[0, -1]
    if temperature == 0:
        return np.asarray(logits)
    words = prng.row_keys(SEED, "train", STEP, *(np.asarray([k]) for k in key))[0]
    noise = prng.gumbel(jnp.asarray(words), jnp.int32(len(before)), jnp.arange(ARCH.vocab_size))
    return np.asarray(logits / temperature + noise)


def difference(prompt, before, key, a, b):
    return Difference(STEP, key, len(before), a, b, prompt, before)


def rulings(differences, **config):
    return audit.recompute(ARCH, PARAMS, RolloutConfig(**config), SEED, encode, differences)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_scores_are_those_of_the_formula(temperature):
    cases = [("abc", [4, 5], (7, 0, 1)), ("defghi", [], (8, 1, 0)), ("xa", [1, 2, 3], (9, 0, 0))]
    cases *= 4  # more than one forward holds
    wanted = [noisy(*case, temperature) for case in cases]
    ranks = [np.argsort(-scores) for scores in wanted]
    actual = rulings([difference(*case, int(r[0]), int(r[1]))
                      for case, r in zip(cases, ranks, strict=True)], temperature=temperature)
    assert len(actual) == 12
    for ruling, scores, rank in zip(actual, wanted, ranks, strict=True):
        assert ruling.drawn == rank[0]
        assert ruling.score_a == pytest.approx(scores[rank[0]], abs=1e-4)
        assert ruling.gap == pytest.approx(scores[rank[0]] - scores[rank[1]], abs=1e-4)


def test_near_means_both_near_the_best():
    case = ("abc", [4], (7, 0, 1))
    scores = noisy(*case)
    first, second, third = np.argsort(-scores)[:3].tolist()
    two, below = rulings([difference(*case, second, first), difference(*case, second, third)])
    assert two.gap == pytest.approx(scores[first] - scores[second], abs=1e-4)
    assert below.gap == pytest.approx(scores[first] - scores[third], abs=1e-4)
    assert not two.near_tie and not below.near_tie
    between = (two.gap + below.gap) / 2
    two, below = (dataclasses.replace(ruling, tolerance=between) for ruling in (two, below))
    assert two.near_tie and not below.near_tie


def test_tolerance_is_the_span_of_the_dtypes_errors():
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), PARAMS)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), narrow)
    tokens = np.zeros((audit.ROWS_AT_ONCE, audit.LENGTH_MULTIPLE), np.int32)
    tokens[:, :4] = encode("abc") + [4]
    rounded, exact = (audit.next_logits(ARCH, params, tokens, np.full(len(tokens), 4))[:, 0]
                      for params in (narrow, wide))
    span = float((rounded - exact).max() - (rounded - exact).min())
    assert span > 1e-3
    for params, want in ((narrow, span / 0.5), (wide, 1e-4)):
        ruling, = audit.recompute(ARCH, params, RolloutConfig(temperature=0.5), SEED, encode,
                                  [difference("abc", [4], (7, 0, 1), 3, 5)])
        assert ruling.tolerance == pytest.approx(want, rel=1e-3)


def test_what_bfloat16_draws_otherwise_is_a_near_tie():
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), PARAMS)
    keys = [(i, 0, 0) for i in range(400)]
    words = np.concatenate([prng.row_keys(SEED, "train", STEP, *(np.asarray([k]) for k in key))
                            for key in keys])
    noise = prng.gumbel(jnp.asarray(words), jnp.zeros(len(keys), jnp.int32),
                        jnp.arange(ARCH.vocab_size))
    drawn = []
    for dtype in (jnp.bfloat16, jnp.float32):
        params = jax.tree.map(lambda a, dtype=dtype: a.astype(dtype), narrow)
        logits = transformer.forward(ARCH, params, jnp.asarray([encode("abc")]), jnp.asarray([3]))
        drawn.append(np.asarray((logits[0, -1:] + noise).argmax(-1)))
    differ = np.flatnonzero(drawn[0] != drawn[1])
    assert 0 < len(differ) < 20
    cases = [("abc", [], keys[i], int(drawn[0][i]), int(drawn[1][i])) for i in differ]
    actual = audit.recompute(ARCH, narrow, RolloutConfig(), SEED, encode,
                             [difference(*case) for case in cases])
    assert all(ruling.near_tie for ruling in actual)
    assert any(ruling.gap > 1e-4 for ruling in actual)  # float32 would not have rounded so


def test_ruling_on_truncated_token_is_a_real_difference():
    case = ("abc", [4], (7, 0, 1))
    logits = np.asarray(transformer.forward(
        ARCH, PARAMS, jnp.asarray([[0, 1, 2, 4]]), jnp.asarray([4]))[0, -1])
    order = np.argsort(-logits).tolist()
    inside, outside = rulings([difference(*case, order[0], order[1]),
                               difference(*case, order[0], order[2])], top_k=2)
    assert math.isfinite(inside.gap) and inside.drawn in order[:2]
    assert outside.score_b == -math.inf and outside.gap == math.inf and not outside.near_tie


def test_ruling_on_ended_sequence_is_a_real_difference():
    ruling, = rulings([difference("abc", [4], (7, 0, 1), 3, None)])
    assert ruling.gap == math.inf and not ruling.near_tie


@pytest.mark.parametrize("config, want", [
    (dict(top_k=1), [True, True, False, False]),  # a tie for the last place is within rounding
    (dict(top_k=2), [True, True, False, False]),
    (dict(top_k=3), [True, True, True, False]),
    (dict(top_p=0.3), [True, True, False, False]),
    (dict(top_p=0.9), [True, True, True, False]),
    (dict(top_p=0.85), [True, True, True, False]),
    (dict(top_p=0.8), [True, True, True, False]),  # at its very edge
    (dict(top_p=0.79), [True, True, False, False]),
    (dict(top_k=3, top_p=0.87), [True, True, True, False]),
    (dict(top_k=3, top_p=0.8), [True, True, False, False]),  # .84 of what top-k kept
    (dict(), [True] * 4),
])
def test_kept_takes_the_edge_as_uncertain(config, want):
    logits = np.log(np.asarray([0.4, 0.4, 0.15, 0.05], np.float32))
    assert [audit.kept(logits, t, RolloutConfig(**config), 1e-4) for t in range(4)] == want
