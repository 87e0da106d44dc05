"""Estimates of acceptance judged on outcomes that they have not seen."""

import numpy as np
import pytest

from experiments.bench import classes
from specrl_jax.control.acceptance import BINS, Acceptance


def outcome(accepted: float) -> Acceptance:
    """1000 nodes of the lowest guess, which no other cell raises; this share was drawn."""
    tried, hit = np.zeros((2, 1, 2, BINS), np.float32)
    tried[0, 0, 0], hit[0, 0, 0] = 1000, 1000 * accepted
    return Acceptance(tried, hit)


def test_another_classes_outcomes_are_further_off() -> None:
    found = classes.compare({"easy": [outcome(0.9), outcome(0.9)],
                             "hard": [outcome(0.1), outcome(0.1)]})
    for name in ("easy", "hard"):
        error = {source: one["error"] for source, one in found[name].items()}
        assert error["own"] == pytest.approx(0, abs=0.02)
        assert error["all"] == pytest.approx(0.4, abs=0.02)
        assert error["others"] == pytest.approx(0.8, abs=0.04)
        loss = {source: one["log_loss"] for source, one in found[name].items()}
        assert loss["own"] == pytest.approx(-0.9 * np.log(0.9) - 0.1 * np.log(0.1), abs=0.01)
        assert loss["own"] < loss["all"] < loss["others"]


def test_the_half_that_judges_is_not_learned_from() -> None:
    found = classes.compare({"one": [outcome(0.9), outcome(0.1)], "two": [outcome(0.5)] * 2})
    assert found["one"]["own"]["error"] == pytest.approx(0.8, abs=0.04)
