"""Losses worked out by hand, identities, and micro-batches that add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.config import ConfigError, RLConfig
from specrl_jax.rl import losses as pl
from specrl_jax.rl.losses import CORRECTIONS, LIMIT

CLIP = dict(clip_low=0.2, clip_high=0.5)
PPO = dict(loss=pl.ppo_clip, correction=CORRECTIONS["none"], rl=RLConfig(**CLIP))


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
    surrogate = wrap(functools.partial(pl.ppo_clip, mask=jnp.ones(4, bool), **CLIP))
    ratios = dict(logprob=log([0.1, 0.4, 0.5, 0.6]), old_logprob=log([0.2, 0.4, 0.4, 0.3]))
    got, _ = surrogate(**ratios, advantage=f32(2.0))
    np.testing.assert_allclose(got, [-1.0, -2.0, -2.5, -3.0], rtol=1e-6)
    got, _ = surrogate(**ratios, advantage=f32(-2.0))
    np.testing.assert_allclose(got, [1.6, 2.0, 2.5, 4.0], rtol=1e-6)


@pytest.mark.parametrize("advantage, clipped, slope", [
    # Slopes are -A r where the clip is off and 0 where it binds.
    (2.0, [False, False, False, True], [-1.0, -2.0, -2.5, 0.0]),
    (-2.0, [True, False, False, False], [0.0, 2.0, 2.5, 4.0]),
    (0.0, [False, False, False, False], [0.0, 0.0, 0.0, 0.0]),
])
def test_gradient_stops_where_the_clip_binds(advantage, clipped, slope):
    logprob, old = log([0.1, 0.4, 0.5, 0.6]), log([0.2, 0.4, 0.4, 0.3])
    args = dict(advantage=f32(advantage), mask=jnp.ones(4, bool), **CLIP)
    got = pl.ppo_clip(logprob=logprob, old_logprob=old, **args)[1]
    np.testing.assert_array_equal(got, clipped)

    def loss(logprob, old):
        return pl.ppo_clip(logprob=logprob, old_logprob=old, **args)[0].sum()

    d_logprob, d_old = jax.grad(loss, argnums=(0, 1))(logprob, old)
    np.testing.assert_allclose(d_logprob, slope, rtol=1e-6)
    np.testing.assert_array_equal(d_old, np.zeros(4))


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("bounds", [CLIP, dict(clip_low=0.0, clip_high=0.0)])
@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_ratio_one_is_the_plain_policy_gradient(loss, bounds, advantage):
    # With old = logprob the gradient is that of -A log p, even between closed bounds.
    logits = f32(np.random.default_rng(0).normal(size=(3, 5)))

    def logprob(x):
        return jax.nn.log_softmax(x)[jnp.arange(3), jnp.array([1, 4, 0])]

    def surrogate(x):
        lp = logprob(x)
        return pl.LOSSES.resolve(loss)(
            logprob=lp, old_logprob=jax.lax.stop_gradient(lp), advantage=f32(advantage),
            mask=jnp.ones(3, bool), **bounds)[0].sum()

    want = jax.grad(lambda x: -advantage * logprob(x).sum())(logits)
    np.testing.assert_allclose(jax.grad(surrogate)(logits), want, atol=1e-6)


def sequence_terms(*, logprob, old_logprob, rollout_logprob, reference, **rest):
    return pl.sequence_terms(logprobs=pl.SequenceLogprobs(
        logprob, old_logprob, rollout_logprob, reference), **rest)


def slopes_of(loss, advantage, mask, logprob, old, **bounds):
    """Loss, where it is clipped, and its slope by logprob, of one sequence."""
    def total(logprob):
        terms, clipped = pl.LOSSES.resolve(loss)(
            logprob=logprob, old_logprob=old, advantage=f32(advantage), mask=jnp.asarray(mask),
            **CLIP | bounds)
        return jnp.where(jnp.asarray(mask), terms, 0).sum(), (terms, clipped)

    slopes, (terms, clipped) = jax.grad(total, has_aux=True)(logprob)
    return terms, clipped, slopes


def test_gspo_by_hand():
    # Two tokens of ratios 1/2 and 2.88: the sequence's is sqrt(1.44) = 1.2. Masked ones are not in
    # it. The loss is -1.2 A at each; its slope is shared by both tokens: 2 x 1.2 A / 2.
    args = dict(mask=[True, True, False], logprob=log([0.1, 0.288, 1.0]),
                old=log([0.2, 0.1, 0.1]))
    terms, clipped, slopes = slopes_of("gspo", 2.0, **args)
    np.testing.assert_allclose(terms, [-2.4] * 3, rtol=1e-6)
    np.testing.assert_allclose(slopes, [-2.4, -2.4, 0.0], rtol=1e-6)
    assert not clipped.any()
    terms, clipped, slopes = slopes_of("gspo", 2.0, clip_high=0.1, **args)
    np.testing.assert_allclose(terms, [-2.2] * 3, rtol=1e-6)
    assert clipped.all() and not slopes.any()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_by_hand(advantage):
    # Weights 1/2 -> 0.8, 1, 5/4, 2 -> 1.5, of -A log p: also clipped tokens keep a slope.
    args = dict(mask=[True] * 4, logprob=log([0.1, 0.4, 0.5, 0.6]), old=log([0.2, 0.4, 0.4, 0.3]))
    terms, clipped, slopes = slopes_of("cispo", advantage, **args)
    weights = np.array([0.8, 1.0, 1.25, 1.5])
    np.testing.assert_allclose(terms, -weights * advantage * np.log([0.1, 0.4, 0.5, 0.6]),
                               rtol=1e-5)
    np.testing.assert_allclose(slopes, -weights * advantage, rtol=1e-6)
    np.testing.assert_array_equal(clipped, [True, False, False, True])
    slopes = slopes_of("cispo", advantage, clip_low=1.0, **args)[2]  # no lower bound
    np.testing.assert_allclose(slopes[0], -0.5 * advantage, rtol=1e-6)


def test_reinforce_by_hand():
    args = dict(mask=[True] * 2, logprob=log([0.1, 0.5]), old=log([0.9, 0.1]))
    terms, clipped, slopes = slopes_of("reinforce", 3.0, **args)
    np.testing.assert_allclose(terms, -3 * np.log([0.1, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(slopes, [-3.0, -3.0], rtol=1e-6)
    assert not clipped.any()


def test_k3_by_hand():
    # p/q = 1/2: 1/2 - 1 + ln 2; 1: 0; 2: 2 - 1 - ln 2. Slope in log q: 1 - p/q.
    q, p = log([0.4, 0.3, 0.2]), log([0.2, 0.3, 0.4])
    got = pl.kl_k3(logprob=q, reference=p)
    np.testing.assert_allclose(got, [np.log(2) - 0.5, 0.0, 1 - np.log(2)], rtol=1e-5)
    slopes = jax.grad(lambda a, b: pl.kl_k3(logprob=a, reference=b).sum(), argnums=(0, 1))(q, p)
    np.testing.assert_allclose(slopes[0], [0.5, 0.0, -1.0], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(slopes[1], np.zeros(3))


def test_k1_and_k2_by_hand():
    # log q/p = ln 2, 0, -ln 2. k2's slope is log q/p, k1's is 1.
    q, p = log([0.4, 0.3, 0.2]), log([0.2, 0.3, 0.4])
    ln2 = np.log(2)
    for name, want, slope in (("k1", [ln2, 0, -ln2], [1, 1, 1]),
                              ("k2", [ln2**2 / 2, 0, ln2**2 / 2], [ln2, 0, -ln2])):
        def total(a, b, name=name):
            return pl.KL_ESTIMATORS[name](logprob=a, reference=b).sum()

        got = pl.KL_ESTIMATORS[name](logprob=q, reference=p)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(jax.grad(total)(q, p), slope, rtol=1e-5, atol=1e-7)
        assert not jax.grad(total, 1)(q, p).any()


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
    terms, metrics = sequence_terms(
        logprob=log([0.4]), old_logprob=log([0.2]), reference=log([0.2]), advantage=f32(1.0),
        rollout_logprob=log([0.2]), mask=jnp.array([True]),
        **PPO | dict(rl=RLConfig(kl=10.0, **CLIP)))
    np.testing.assert_allclose(terms, [-1.5 + 10 * (np.log(2) - 0.5)], rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/ratio_mean"], [2.0], rtol=1e-6)
    np.testing.assert_allclose(metrics["policy/clip_fraction"], [1.0])
    np.testing.assert_allclose(metrics["kl/update"], [1 - np.log(2)], rtol=1e-5)
    np.testing.assert_allclose(metrics["kl/reference"], [np.log(2) - 0.5], rtol=1e-5)


@pytest.mark.parametrize("name, weights, cut", [
    ("none", [1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0]),
    ("truncated", [0.4, 1.0, LIMIT, LIMIT], [0, 0, 1, 1]),
    ("masked", [0.0, 1.0, 4.0, 0.0], [1, 0, 0, 1]),
    ("truncated_sequence", [LIMIT] * 4, [1, 1, 1, 1]),  # 0.4 x 1 x 4 x 8 = 12.8
])
def test_correction_by_hand(name, weights, cut):
    # old / rollout = 0.4, 1, 4 and 8. The loss is -r A = -1 each, and no KL.
    old, rolled = log([0.08, 0.3, 0.4, 0.8]), log([0.2, 0.3, 0.1, 0.1])
    terms, metrics = sequence_terms(
        logprob=old, old_logprob=old, rollout_logprob=rolled, reference=None, advantage=f32(1.0),
        mask=jnp.ones(4, bool), **PPO | dict(correction=CORRECTIONS[name]))
    np.testing.assert_allclose(terms, -np.array(weights), rtol=1e-5)
    np.testing.assert_array_equal(metrics["policy/correction_fraction"], cut)


@pytest.mark.parametrize("loss", pl.LOSSES.values(), ids=pl.LOSSES.names())
@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS.names())
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_masked_positions_are_never_read(garbage, correction, loss):
    mask = jnp.array([True, False, True, False])
    clean = jnp.where(mask, log([0.5, 0.5, 0.2, 0.5]), 0.0)
    dirty = jnp.where(mask, clean, garbage)

    def total(logprob, others):
        terms, metrics = sequence_terms(
            logprob=logprob, old_logprob=others + 0.01, reference=others - 0.1,
            rollout_logprob=others - 0.2, advantage=f32(1.3), mask=mask,
            loss=loss, correction=correction, rl=RLConfig(kl=0.1, **CLIP))
        weights = pl.token_weights(mask=mask, normalize="token", total_tokens=2.0,
                                   total_sequences=1.0, max_new_tokens=4)
        return jnp.sum(weights * terms), metrics

    got, want = (jax.value_and_grad(total, has_aux=True)(x, x) for x in (dirty, clean))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    gradient = got[1]
    np.testing.assert_array_equal(gradient[jnp.array([1, 3])], [0.0, 0.0])
    assert np.all(np.isfinite(gradient)) and np.all(gradient[jnp.array([0, 2])] != 0)


@pytest.mark.parametrize("values, words", [
    (dict(kl_estimator="k1"), "rl.kl_estimator = 'k1': its gradient in the loss has mean 0; use"),
    (dict(kl_in="reward"), "rl.kl_estimator = 'k3': taken from the reward, its gradient is near 0"),
    (dict(kl_in="reward", kl_estimator="k2"), "use k1, or rl.kl_in = loss"),
    (dict(kl_in="both"), "rl.kl_in = 'both': choose one of loss, reward"),
    (dict(entropy=-1.0), "rl.entropy = -1.0: must be at least 0"),
])
def test_bounds_that_cannot_work_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        RLConfig(**values)
    RLConfig(kl_estimator="k1", kl_in="reward")
