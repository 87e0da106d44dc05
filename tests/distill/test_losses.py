"""Drafter losses against hand-worked numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.distill import losses
from specrl_jax.distill.losses import LOSSES

# p has a quarter outside the draft vocabulary, q nothing.
P, Q = np.float32([[0.5], [0.25]]), np.float32([[0.25], [0.75]])
KL = 0.5 * math.log(2) - 0.25 * math.log(3)


def of(term, p=P, q=Q):
    return np.asarray(term(*(jnp.asarray(np.log(x)) for x in (p, q))))


@pytest.mark.parametrize("term, want", [
    (losses.acceptance, 0.5),  # .25 + .25
    (losses.tv, 0.5),  # half of .25 + .5 + .25
    (losses.forward_kl, KL),
    (losses.jsd, math.log(2) / 4),  # m = .375, .5, .125
    (losses.lk, math.exp(-1.5) * KL + (1 - math.exp(-1.5)) / 2),
])
def test_terms_without_renormalising_the_actor(term, want):
    assert of(term) == pytest.approx(want, abs=1e-6)


def gradient(term):
    """With respect to the drafter's logits."""
    grad = jax.grad(lambda z: term(jnp.log(P), jax.nn.log_softmax(z, axis=0)).sum())
    return np.asarray(grad(jnp.log(Q)))[:, 0]


@pytest.mark.parametrize("term, want", [
    # -q (1[q <= p] - S) with S = .25
    (losses.tv, [-0.25 * 0.75, 0.75 * 0.25]),
    # q * p's mass in the draft vocabulary - p
    (losses.forward_kl, [0.25 * 0.75 - 0.5, 0.75 * 0.75 - 0.25]),
])
def test_gradients(term, want):
    assert gradient(term) == pytest.approx(want, abs=1e-6)


def test_lk_mixes_the_two_gradients_and_its_schedule_has_none():
    mix = math.exp(-1.5)
    want = mix * gradient(losses.forward_kl) + (1 - mix) * gradient(losses.tv)
    assert gradient(losses.lk) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("term", [losses.tv, losses.forward_kl, losses.jsd, losses.lk])
def test_equal_distributions_cost_nothing(term):
    whole = np.float32([[0.5, 0.1], [0.25, 0.9], [0.25, 1e-30]])
    assert of(term, whole, whole) == pytest.approx([0, 0], abs=1e-6)


def test_disjoint_distributions_reach_the_bounds():
    p, q = np.float32([[1], [1e-38]]), np.float32([[1e-38], [1]])
    assert of(losses.tv, p, q) == pytest.approx(1)
    assert of(losses.jsd, p, q) == pytest.approx(math.log(2))


MASK = np.array([[True, True], [True, False]])
COUNT = np.float32([4, 2])  # of a batch of which this sequence is half


def test_depths_decay():
    terms = jnp.float32([[1, 2], [3, jnp.nan]])
    got = losses.decayed(terms, MASK, COUNT, 0.8)
    assert got == pytest.approx((1 + 2) / 4 + 0.8 * 3 / 2)


def test_chains_multiply():
    alpha = jnp.float32([[0.5, 0.8], [0.4, 0.1]])
    first = 1 - (0.5 + 0.5 * 0.4) / 2
    assert losses.chained(alpha, MASK, COUNT, 1.0) == pytest.approx((first + 1 - 0.8) / 4)
    # Where the first is never accepted, the second does not matter.
    grad = jax.grad(lambda a: losses.chained(a, MASK, COUNT, 1.0))
    assert grad(alpha.at[0, 0].set(0))[1, 0] == 0 != grad(alpha)[1, 0]


@pytest.mark.parametrize("reward, want", [([1, 0, 1, 0], [2, 0.1, 2, 0.1]),
                                          ([0, 0, 0, 0], [1, 1, 1, 1]),
                                          ([8, 0, 0, 0], [3, 0.1, 0.1, 0.1]),
                                          ([-1, 1, 1, -1], [0.1, 2, 2, 0.1])])
def test_reward_weights_are_normalised_and_clipped(reward, want):
    padded, live = np.float32([*reward, 99]), np.array([True] * 4 + [False])
    got = LOSSES["reward_weighted_kl"].weigh(padded, padded * 0, live)
    assert np.asarray(got)[:4] == pytest.approx(want)


def test_advantage_weights_are_positive_whatever_the_sign():
    advantage, live = np.float32([math.log(3), 0, 50]), np.array([True, True, False])
    got = LOSSES["advantage_weighted_kl"].weigh(advantage * 0, advantage, live)
    assert np.asarray(got)[:2] == pytest.approx([1.5, 0.5])  # 3 and 1 over their mean
