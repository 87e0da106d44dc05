"""Advantages worked out by hand, and what they must never do."""

import functools

import numpy as np
import pytest

from specrl_jax.rl.advantage import ADVANTAGES, group, group_mean, leave_one_out


def f32(rows):
    return np.array(rows, np.float32)


R = 3**-0.5


@pytest.mark.parametrize("advantage, rewards, want", [
    # mean 1/4, deviations 3/4, -1/4 x3; variance (9 + 3) / 64 = 3/16, std sqrt(3)/4
    (group, [1, 0, 0, 0], [3 * R, -R, -R, -R]),
    (group, [1, 0, 1, 0], [1, -1, 1, -1]),  # mean 1/2, std 1/2
    # deviations +-1/2, std 1/2, and 1/2 added to it
    (functools.partial(group, eps=0.5), [1, 0], [0.5, -0.5]),
    (group_mean, [2, 0, 1], [1, -1, 0]),
    (leave_one_out, [3, 0, 0], [3, -1.5, -1.5]),  # 3 - 0 = 3; 0 - (3 + 0) / 2, twice
])
def test_advantage_by_hand(advantage, rewards, want):
    got = advantage(f32([rewards]))
    np.testing.assert_allclose(got, [want], rtol=1e-5)
    assert got.dtype == np.float32


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7, 1e-20, 3e30])
@pytest.mark.parametrize("samples", [2, 3, 7, 64])
def test_groups_that_agree_get_exactly_zero(reward, samples):
    # In float32 the mean of three times 0.1 is not 0.1: noise over eps would be an advantage.
    rewards = np.full((2, samples), reward, np.float32)
    for name in ADVANTAGES.names():
        np.testing.assert_array_equal(ADVANTAGES[name](rewards), np.zeros_like(rewards))


def test_groups_are_strangers_and_order_follows_samples():
    rewards = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    whole = group(rewards)
    for g in range(3):
        np.testing.assert_array_equal(whole[g : g + 1], group(rewards[g : g + 1]))
    np.testing.assert_allclose(whole.mean(axis=1), 0.0, atol=1e-6)
    np.testing.assert_allclose((whole**2).mean(axis=1), 1.0, rtol=1e-4)


@pytest.mark.parametrize("advantages", ADVANTAGES.values(), ids=ADVANTAGES.names())
def test_bad_rewards_are_named(advantages):
    with pytest.raises(TypeError, match=r"f32\[groups, M\], got float64\[1, 2\]"):
        advantages(np.zeros((1, 2)))
    with pytest.raises(TypeError, match=r"got float32\[4\]"):
        advantages(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="needs 2 samples or more"):
        advantages(np.zeros((4, 1), np.float32))
    with pytest.raises(ValueError, match="reward nan of group 1, sample 0"):
        advantages(f32([[0, 1], [np.nan, 1]]))
