"""Intervals and pass@k against enumeration, published values and coverage."""

import itertools

import numpy as np
import pytest

from specrl_jax.evaluation import statistics


@pytest.mark.parametrize("samples, correct, k", [
    (5, 2, 3), (5, 0, 2), (4, 4, 1), (4, 3, 2), (3, 1, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(samples, correct, k):
    subsets = list(itertools.combinations([1] * correct + [0] * (samples - correct), k))
    share = sum(any(s) for s in subsets) / len(subsets)
    assert statistics.pass_at_k(samples, correct, k) == pytest.approx(share)


@pytest.mark.parametrize("successes, trials, low, high", [
    (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17, 1998, table I, method 3
    (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_wilson_gives_published_values(successes, trials, low, high):
    assert statistics.wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_bootstrap_of_many_problems_agrees_with_normal_interval():
    values = np.random.default_rng(0).integers(0, 5, 400) / 4
    half = statistics.Z * values.std() / 20
    low, high = statistics.bootstrap(values)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.005)
    assert statistics.bootstrap(values) == (low, high)


def test_student_gives_the_published_quantiles():
    """t of .975 for 1, 2 and 4 degrees of freedom (Student, Biometrika 6, 1908; any table)."""
    for values, t in (([0.0, 2.0], 12.706), ([0.0, 1.0, 2.0], 4.303), ([1, 2, 3, 4, 5], 2.776)):
        half = t * np.std(values, ddof=1) / len(values) ** 0.5
        want = np.mean(values) - half, np.mean(values) + half
        assert statistics.student(values) == pytest.approx(want, abs=2e-3)


def test_interval_names_its_method():
    assert statistics.interval([0, 1, 1, 0]) == (*statistics.wilson(2, 4), "wilson")
    assert statistics.interval([0, 0.5, 1])[2] == "bootstrap"
