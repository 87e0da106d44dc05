"""Advantages worked out by hand, and what they must never do."""

import functools

import numpy as np
import pytest

from specrl_jax.config import Config, ConfigError, RLConfig
from specrl_jax.config.rl import OF_GROUPS
from specrl_jax.rl.advantage import (
    ADVANTAGES,
    batch,
    greedy_baseline,
    group,
    group_mean,
    leave_one_out,
    none,
)


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
    (functools.partial(greedy_baseline, baseline=f32([0.25])), [1, 0], [0.75, -0.25]),
    (none, [1, 0, -2], [1, 0, -2]), (none, [5], [5]),
])
def test_advantage_by_hand(advantage, rewards, want):
    got = advantage(f32([rewards]))
    np.testing.assert_allclose(got, [want], rtol=1e-5)
    assert got.dtype == np.float32


def test_batch_is_normalised_over_the_step():
    # Mean 1/2 and std 1/2 of all four; the groups' own would be others.
    np.testing.assert_allclose(batch(f32([[1, 1], [1, -1]])), [[R, R], [R, -3 * R]], rtol=1e-5)
    np.testing.assert_allclose(batch(f32([[1], [0]])), [[1], [-1]], rtol=1e-5)  # groups of 1


@pytest.mark.parametrize("name", [*OF_GROUPS, "batch"])
def test_shift_of_rewards_changes_no_advantage(name):
    rewards = np.random.default_rng(1).integers(0, 9, (4, 3)).astype(np.float32)
    np.testing.assert_allclose(ADVANTAGES[name](rewards + 7), ADVANTAGES[name](rewards), atol=1e-6)


def call(name, rewards):
    more = {"baseline": f32(np.arange(len(rewards)))} if name == "greedy_baseline" else {}
    return ADVANTAGES[name](rewards, **more)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7, 1e-20, 3e30])
@pytest.mark.parametrize("samples", [2, 3, 7, 64])
def test_groups_that_agree_get_exactly_zero(reward, samples):
    # In float32 the mean of three times 0.1 is not 0.1: noise over eps would be an advantage.
    rewards = np.full((2, samples), reward, np.float32)
    for name in (*OF_GROUPS, "batch"):
        np.testing.assert_array_equal(ADVANTAGES[name](rewards), np.zeros_like(rewards))
    same = greedy_baseline(rewards, rewards[:, 0])
    np.testing.assert_array_equal(same, np.zeros_like(rewards))


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_group_of_one_is_refused_where_samples_are_compared(name):
    options = {"group_size": 1, "rl": RLConfig(advantage=name)}
    if name in OF_GROUPS:
        with pytest.raises(ConfigError, match=f"group_size = 1.*{name}"):
            Config(**options)
    else:
        assert Config(**options).group_size == 1
