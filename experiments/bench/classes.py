"""Estimates of acceptance for a class of prompts, from its own outcomes and from all classes'."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specrl_jax.control import acceptance
from specrl_jax.control.acceptance import Acceptance
from specrl_jax.rollout import calibration


def compare(outcomes: dict[str, Sequence[Acceptance]]) -> dict[str, dict[str, dict[str, float]]]:
    """By class and source of the estimate: expected calibration error, and log loss in nats.

    Args:
      outcomes: of each class, one of a rollout, fields f32[drafters, D, BINS]; estimates come from
        the first half of the rollouts, and the second half judges them.
    """
    half = {name: len(runs) // 2 for name, runs in outcomes.items()}
    learned = {name: add(runs[: half[name]]) for name, runs in outcomes.items()}
    sources = {"guess": [jax.tree.map(np.zeros_like, next(iter(learned.values())))],
               "all": list(learned.values())}
    found = {}
    for name, runs in outcomes.items():
        others = [one for other, one in learned.items() if other != name]
        found[name] = {source: judge(add(known), add(runs[half[name]:])) for source, known in
                       ({"own": [learned[name]], "others": others} | sources).items()}
    return found


def add(outcomes: Sequence[Acceptance]) -> Acceptance:
    return jax.tree.map(lambda *parts: np.sum(parts, 0), *outcomes)


def judge(known: Acceptance, outcome: Acceptance) -> dict[str, Any]:
    """What the estimate that `known` gives promised, and what came of it."""
    seen = jax.tree.map(lambda a: np.asarray(a, np.float64)[None], outcome)
    estimate = acceptance.table(known, jax.tree.map(np.zeros_like, seen))
    likely = np.clip(np.float64(estimate), 1e-6, 1 - 1e-6)
    loss = -(outcome.hit * np.log(likely) + (outcome.tried - outcome.hit) * np.log1p(-likely))
    return {"error": calibration.judge(seen, estimate).error,
            "log_loss": float(loss.sum() / max(outcome.tried.sum(), 1))}
