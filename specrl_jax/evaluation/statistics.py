"""Statistics of evaluations: avg@k, pass@k, and 95 % intervals over problems or seeds."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95
Z = 1.959963984540054  # standard normal quantile of (1 + LEVEL) / 2
RESAMPLES, RESAMPLING_SEED = 10_000, 0
_VALUES_AT_ONCE = 1_000_000


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the probability that one of k samples, drawn without replacement, is correct.

    The unbiased estimator of Chen et al., Evaluating Large Language Models Trained on Code
    (arXiv 2107.03374), section 2.1.
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Returns Wilson's score interval of a proportion (Journal of the American Statistical
    Association 22, 1927), which stays sensible at 0 and 1."""
    p, z2 = successes / trials, Z * Z
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of a mean over problems, with a fixed seed."""
    x = np.asarray(values, np.float64)
    rng = np.random.default_rng(RESAMPLING_SEED)
    at_once = max(1, _VALUES_AT_ONCE // len(values))
    means = np.concatenate([
        x[rng.integers(0, len(values), (min(at_once, RESAMPLES - done), len(values)))].mean(1)
        for done in range(0, RESAMPLES, at_once)])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def student(values: Sequence[float]) -> tuple[float, float]:
    """Returns Student's interval of the mean of two or more values, one a seed; for two arms, their
    differences by seed. A percentile bootstrap of five values would be far too narrow."""
    x = np.asarray(values, np.float64)
    quantile = stdtrit(len(x) - 1, (1 + LEVEL) / 2)
    half = quantile * x.std(ddof=1) / math.sqrt(len(x))
    return float(x.mean() - half), float(x.mean() + half)


def interval(values: Sequence[float]) -> tuple[float, float, str]:
    """Returns the 95 % interval (low, high) of a mean of numbers in 0..1, one a problem, and its
    name: "wilson" if all values are 0 or 1, else "bootstrap"."""
    if set(values) <= {0, 1}:
        return *wilson(int(sum(values)), len(values)), "wilson"
    return *bootstrap(values), "bootstrap"
