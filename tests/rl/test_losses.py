"""Losses worked out by hand, identities, and micro-batches that add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.rl import losses as pl
from specrl_jax.rl.corrections import CORRECTIONS, LIMIT

CLIP = dict(clip_low=0.2, clip_high=0.5)
PPO = dict(loss=pl.clipped_surrogate, correction=CORRECTIONS["none"], **CLIP)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def f32(values):
    return jnp.asarray(values, jnp.float32)


def log(values):
    return jnp.log(f32(values))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_surrogate_by_hand(wrap):
    # Ratios 1/2, 1, 5/4, 2 with bounds 0.8 and 1.5.
    # A = 2: min(r A, clip(r) A) = 1, 2, 2.5, 3 (2 is cut to 1.5). The loss is its negative.
    # A = -2: min(-1, -1.6) = -1.6 (1/2 is raised to 0.8); -2; -2.5; min(-4, -3) = -4, not cut.
    surrogate = wrap(functools.partial(pl.clipped_surrogate, **CLIP))
    ratios = dict(logprob=log([0.1, 0.4, 0.5, 0.6]), old_logprob=log([0.2, 0.4, 0.4, 0.3]))
    got = surrogate(**ratios, advantage=f32(2.0))
    np.testing.assert_allclose(got, [-1.0, -2.0, -2.5, -3.0], rtol=1e-6)
    got = surrogate(**ratios, advantage=f32(-2.0))
    np.testing.assert_allclose(got, [1.6, 2.0, 2.5, 4.0], rtol=1e-6)


@pytest.mark.parametrize("advantage, clipped, slope", [
    # Slopes are -A r where the clip is off and 0 where it binds.
    (2.0, [False, False, False, True], [-1.0, -2.0, -2.5, 0.0]),
    (-2.0, [True, False, False, False], [0.0, 2.0, 2.5, 4.0]),
    (0.0, [False, False, False, False], [0.0, 0.0, 0.0, 0.0]),
])
def test_gradient_stops_where_the_clip_binds(advantage, clipped, slope):
    logprob, old = log([0.1, 0.4, 0.5, 0.6]), log([0.2, 0.4, 0.4, 0.3])
    args = dict(advantage=f32(advantage), **CLIP)
    got = pl.clip_indicator(logprob=logprob, old_logprob=old, **args)
    np.testing.assert_array_equal(got, clipped)

    def loss(logprob, old):
        return pl.clipped_surrogate(logprob=logprob, old_logprob=old, **args).sum()

    d_logprob, d_old = jax.grad(loss, argnums=(0, 1))(logprob, old)
    np.testing.assert_allclose(d_logprob, slope, rtol=1e-6)
    np.testing.assert_array_equal(d_old, np.zeros(4))


@pytest.mark.parametrize("bounds", [CLIP, dict(clip_low=0.0, clip_high=0.0)])
@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_ratio_one_is_the_plain_policy_gradient(bounds, advantage):
    # With old = logprob the surrogate's gradient is that of -A log p, even between closed bounds.
    logits = f32(np.random.default_rng(0).normal(size=(3, 5)))

    def logprob(x):
        return jax.nn.log_softmax(x)[jnp.arange(3), jnp.array([1, 4, 0])]

    def surrogate(x):
        lp = logprob(x)
        return pl.clipped_surrogate(logprob=lp, old_logprob=lp, advantage=f32(advantage),
                                    **bounds).sum()

    want = jax.grad(lambda x: -advantage * logprob(x).sum())(logits)
    np.testing.assert_allclose(jax.grad(surrogate)(logits), want, atol=1e-6)
    np.testing.assert_allclose(surrogate(logits), -3 * advantage, rtol=1e-6)


def test_k3_by_hand():
    # p/q = 1/2: 1/2 - 1 + ln 2; 1: 0; 2: 2 - 1 - ln 2. Slope in log q: 1 - p/q.
    q, p = log([0.4, 0.3, 0.2]), log([0.2, 0.3, 0.4])
    got = pl.kl_k3(logprob=q, reference=p)
    np.testing.assert_allclose(got, [np.log(2) - 0.5, 0.0, 1 - np.log(2)], rtol=1e-5)
    slopes = jax.grad(lambda a, b: pl.kl_k3(logprob=a, reference=b).sum(), argnums=(0, 1))(q, p)
    np.testing.assert_allclose(slopes[0], [0.5, 0.0, -1.0], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(slopes[1], np.zeros(3))


def test_k3_is_the_kl_in_expectation_and_never_negative():
    q, p = np.random.default_rng(1).dirichlet(np.ones(7), size=2)
    k3 = pl.kl_k3(logprob=log(q), reference=log(p))
    np.testing.assert_allclose(np.sum(q * k3), np.sum(q * np.log(q / p)), rtol=1e-5)
    near = f32(-0.01 + np.linspace(-1e-4, 1e-4, 101))  # where exp(x) - 1 - x would cancel
    assert pl.kl_k3(logprob=near, reference=jnp.full(101, -0.01)).min() >= 0


def test_weights_by_hand():
    # Two sequences of 3 and 1 tokens, limit 5. token: 1/4 each. sequence: 1/(2*3) and 1/(2*1).
    # constant: 1/(2*5). The third row is padding and counts nowhere.
    mask = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
    tokens, sequences = 4.0, 2.0
    for normalize, first, second in (("token", 1 / 4, 1 / 4), ("sequence", 1 / 6, 1 / 2),
                                     ("constant", 1 / 10, 1 / 10)):
        got = weigh(mask, normalize, tokens, sequences)
        want = np.asarray(mask) * np.array([[first], [second], [0.0]], np.float32)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def weigh(mask, normalize, tokens, sequences):
    one = functools.partial(pl.token_weights, normalize=normalize, total_tokens=tokens,
                            total_sequences=sequences, max_new_tokens=5)
    return jax.vmap(lambda m: one(mask=m))(mask)


def test_terms_add_the_kl_and_report_metrics():
    # Ratio 2 with A = 1, cut at 1.5; p/q of the reference 1/2: k3 = ln 2 - 1/2.
    # Ratio 2 seen from old: KL(old || new) is estimated by 2 - 1 - ln 2.
    terms, metrics = pl.sequence_terms(
        logprob=log([0.4]), old_logprob=log([0.2]), reference=log([0.2]), advantage=f32(1.0),
        rollout_logprob=log([0.2]), mask=jnp.array([True]), kl=10.0, **PPO)
    np.testing.assert_allclose(terms, [-1.5 + 10 * (np.log(2) - 0.5)], rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/clip_fraction"], [1.0])
    np.testing.assert_allclose(metrics["kl/update"], [1 - np.log(2)], rtol=1e-5)
    np.testing.assert_allclose(metrics["kl/reference"], [np.log(2) - 0.5], rtol=1e-5)


def test_truncated_correction_by_hand():
    # old / rollout = 1/2, 1 and 4; the last is cut to 2. The loss is -r A = -1 each, and no KL.
    old, rolled = log([0.1, 0.3, 0.4]), log([0.2, 0.3, 0.1])
    terms, _ = pl.sequence_terms(
        logprob=old, old_logprob=old, rollout_logprob=rolled, reference=None, advantage=f32(1.0),
        mask=jnp.array([True, True, True]), kl=0.0,
        **PPO | dict(correction=CORRECTIONS["truncated"]))
    np.testing.assert_allclose(terms, [-0.5, -1.0, -LIMIT], rtol=1e-6)


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS.names())
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_masked_positions_are_never_read(garbage, correction):
    mask = jnp.array([True, False, True, False])
    clean = jnp.where(mask, log([0.5, 0.5, 0.2, 0.5]), 0.0)
    dirty = jnp.where(mask, clean, garbage)

    def loss(logprob, others):
        terms, metrics = pl.sequence_terms(
            logprob=logprob, old_logprob=others + 0.01, reference=others - 0.1,
            rollout_logprob=others - 0.2, advantage=f32(1.3), mask=mask, kl=0.1,
            **PPO | dict(correction=correction))
        weights = pl.token_weights(mask=mask, normalize="token", total_tokens=2.0,
                                   total_sequences=1.0, max_new_tokens=4)
        return jnp.sum(weights * terms), metrics

    got, want = (jax.value_and_grad(loss, has_aux=True)(x, x) for x in (dirty, clean))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    gradient = got[1]
    np.testing.assert_array_equal(gradient[jnp.array([1, 3])], [0.0, 0.0])
    assert np.all(np.isfinite(gradient)) and np.all(gradient[jnp.array([0, 2])] != 0)


def test_arguments_are_checked_by_name():
    good = dict(logprob=jnp.zeros(3), old_logprob=jnp.zeros(3), advantage=f32(1.0), **CLIP)
    with pytest.raises(TypeError, match=r"logprob must be float32 of rank 1, got float32\[2, 3\]"):
        pl.clipped_surrogate(**good | dict(logprob=jnp.zeros((2, 3))))
    with pytest.raises(TypeError, match=r"old_logprob must be float32 .* got bfloat16\[3\]"):
        pl.clipped_surrogate(**good | dict(old_logprob=jnp.zeros(3, jnp.bfloat16)))
    with pytest.raises(TypeError, match=r"lengths differ: logprob \[3\], old_logprob \[1\]"):
        pl.clipped_surrogate(**good | dict(old_logprob=jnp.zeros(1)))
    with pytest.raises(TypeError, match=r"advantage must be float32 of rank 0"):
        pl.clipped_surrogate(**good | dict(advantage=jnp.zeros(3)))
    rest = PPO | dict(rollout_logprob=jnp.zeros(3), kl=0.0)
    with pytest.raises(TypeError, match=r"mask must be bool of rank 1, got float32\[3\]"):
        pl.sequence_terms(**good | rest, mask=jnp.ones(3), reference=None)
    with pytest.raises(TypeError, match=r"mask \[3\] and values \[1\] differ"):
        pl.sequence_terms(**good | rest, mask=jnp.ones(3, bool), reference=jnp.zeros(1))
    with pytest.raises(ValueError, match="normalize = 'mean': choose one of token"):
        pl.token_weights(mask=jnp.ones(3, bool), normalize="mean", total_tokens=1.0,
                         total_sequences=1.0, max_new_tokens=3)
