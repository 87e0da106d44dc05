"""Whole rollouts under the other rules: rejection keeps the law, a lossy rule is noticed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Dice, Task, ask, make_engine, random_drafter, tiny_arch, tiny_params
from scipy import stats

from specrl_jax.config import DRAWN_RULES, ConfigError
from specrl_jax.control import policies
from specrl_jax.model.transformer import forward
from specrl_jax.rollout.engine import Result

ARCH = tiny_arch()
TASK = Task([[5, 9, 2]], group=600, prompt=4, response=2, stop=(-1,))
LEVEL = 1e-4  # chance that a right rule fails a check; seeds are fixed


@functools.cache
def params() -> Any:
    return tiny_params(ARCH)


@functools.cache
def roll_out(rule: str) -> list[Result]:
    """Two rollouts under random trees."""
    likely = np.unravel_index(law().argmax(), law().shape)
    guesses = np.tile(np.asarray(likely, np.int32), (TASK.sequences, 1))
    engine = make_engine(
        ARCH, TASK, batch=30, controller=policies.fixed(), rule=rule, most=120,
        drafter=random_drafter(Dice(guesses), nodes=4, depth=2, vocab=24))
    engine.control = policies.make_spec(2, 4, 4, 0)
    engine.compile(params())
    return [engine.run(params(), ask(TASK, seed)) for seed in range(2)]


@functools.cache
def law() -> np.ndarray:
    """f64[24, 24] of the first two tokens, by plain forwards."""
    prompt = TASK.prompts[0]
    rows = jnp.asarray([[*prompt, first] for first in range(24)])
    logits = np.asarray(forward(ARCH, params(), rows, jnp.full(24, 4)), np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p[0, 2][:, None] * p[:, 3]


def p_value(rule: str) -> float:
    """Chi-square of all pairs of tokens against their law, rare cells pooled."""
    pairs = np.concatenate([result.sequences.tokens for result in roll_out(rule)])
    expected = (len(pairs) * law()).reshape(-1)
    seen = np.bincount(pairs[:, 0] * 24 + pairs[:, 1], minlength=24 * 24).astype(float)
    rare = expected < 6
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(np.append(seen[~rare], seen[rare].sum()), expected).pvalue)


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_lossless_rule_keeps_the_law(rule: str) -> None:
    assert all(r.counters["accepted"] > 20 and r.rule == rule for r in roll_out(rule))
    assert p_value(rule) > LEVEL


def test_a_lossy_rule_is_noticed() -> None:
    assert p_value("lossy_typical") < 1e-9


@pytest.mark.parametrize("rule", DRAWN_RULES)
def test_a_drafter_that_does_not_tell_what_it_drew_from_is_refused(rule: str) -> None:
    engine = make_engine(
        ARCH, TASK, batch=30, controller=policies.fixed(), rule=rule, most=120,
        drafter=random_drafter(Dice(np.zeros((600, 2))), nodes=4, depth=2, vocab=24))
    with pytest.raises(ConfigError, match=f"spec.rule = {rule!r}: the drafter does not tell what"):
        engine.compile(params())


def test_log_probabilities_of_rejection_equal_a_plain_forward() -> None:
    result = roll_out("rejection")[0]
    pairs = result.sequences.tokens
    rows = jnp.asarray(np.concatenate([np.tile(TASK.prompts[0], (len(pairs), 1)), pairs[:, :1]], 1))
    logp = jax.nn.log_softmax(forward(ARCH, params(), rows, jnp.full(len(pairs), 4)), -1)
    want = np.take_along_axis(np.asarray(logp)[:, 2:4], pairs[..., None], 2)[..., 0]
    np.testing.assert_allclose(result.sequences.logprob, want, atol=1e-4)
    np.testing.assert_allclose(result.sequences.raw_logprob, want, atol=1e-4)
