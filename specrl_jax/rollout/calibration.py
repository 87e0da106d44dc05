"""How well the estimates that drafts were chosen by agree with what was accepted."""

from typing import NamedTuple

import numpy as np

from specrl_jax.control.acceptance import Acceptance


class Reliability(NamedTuple):
    """What an estimate promised and what was accepted, by bin of the guess."""

    tried: np.ndarray  # f64[BINS] nodes
    predicted: np.ndarray  # f64[BINS] mean estimate
    accepted: np.ndarray  # f64[BINS] share
    error: float  # expected calibration error, over all cells


def judge(seen: Acceptance, estimate: np.ndarray) -> Reliability:
    """Judges an estimate f32[drafters, D, BINS] by outcomes that it was made without."""
    tried, hit = (np.asarray(a, np.float64).sum(0) for a in (seen.tried, seen.hit))
    by_bin, expected = tried.sum((0, 1)), tried * estimate
    predicted, accepted = (np.divide(a.sum((0, 1)), by_bin, out=np.zeros_like(by_bin),
                                     where=by_bin > 0) for a in (expected, hit))
    error = float(np.abs(hit - expected).sum() / max(tried.sum(), 1))
    return Reliability(by_bin, predicted, accepted, error)
