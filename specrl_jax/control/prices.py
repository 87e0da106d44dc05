"""What tables of time get wrong, learned from whole rollouts.

A batch size's launches of one rollout take the pace of the machine, which drifts, times what tables
foresee, with the errors of the prices that were paid. Of one setting alone both are the same to
see. So now and then a rollout takes buckets of which little is known to be cheaper than they are
believed to be, and tries one that is then the best. Rollouts are compared, and not launches, since
what tables know nothing of (rows that end, contexts that grow) is alike in them.
"""

from collections.abc import Sequence

import numpy as np
from flax import struct

from specrl_jax.control.cost import Bucket, Table
from specrl_jax.structs import Array

PACE = 0.3  # standard deviations, of logarithms: of the pace at first,
DRIFT = 0.02  # and of its change from one rollout to the next
PRICE = 0.07  # of the error of a price at first, and at most,
FADE = 0.003  # and of its change from one rollout to the next
NOISE = 0.02  # of a rollout's seconds,
STALL = 0.001  # s, and more
BELIEVED = 3.0  # standard deviations of a surprise: what is spoilt counts as no more
TRIALS = 16  # rollouts of a batch size of which one tries; at first the second, fourth and eighth


@struct.dataclass
class Prices:
    """Of one batch size. Its n - 1 prices are those of its buckets, and one of drafts."""

    known: Array  # f32[n, 1 + n] means of the logarithms of pace and errors, and their covariance
    factor: Array  # f32[2, n - 1] of the table: as believed, and as the next rollout takes them
    rollouts: Array  # i32[] that were learned from
    paid: Array  # f32[n + 1] in this rollout, seconds: n - 1 foreseen, those of launches, and taken


def blank(buckets: Sequence[Bucket]) -> Prices:
    """Before any rollout, as host arrays."""
    parts = len(buckets) + 1
    variance = np.diag([PACE**2] + [PRICE**2] * parts)
    return Prices(known=np.c_[np.zeros(1 + parts), variance].astype(np.float32),
                  factor=np.ones((2, parts), np.float32), rollouts=np.int32(0),
                  paid=np.zeros(parts + 2, np.float32))


def corrected(table: Table, factor: Array) -> Table:
    """The table with its prices times `factor` f32[n - 1]; traced."""
    return table.replace(verify=table.verify * factor[:-1, None], draft=table.draft * factor[-1],
                         catch_up=table.catch_up * factor[-1])


def pay(prices: Prices, spent: Array, besides: Array, took: float) -> Prices:
    """After a launch.

    Args:
      spent: f32[at least n - 1] seconds foreseen of its buckets, as believed, and last of drafts.
      besides: f32[] foreseen of a launch.
      took: seconds.
    """
    buckets = len(prices.paid) - 3
    return prices.replace(paid=prices.paid + np.asarray(
        [*spent[:buckets].tolist(), spent[-1], besides, took], np.float32))


def learn(prices: Prices) -> Prices:
    """After a rollout, by a Kalman filter (Kalman 1960, equations 21 to 29)."""
    paid = np.asarray(prices.paid, np.float64)
    spent, besides, took = paid[:-2], paid[-2], paid[-1]
    if took <= 0 or spent.sum() <= 0:
        return prices
    mean, cov = np.split(np.asarray(prices.known, np.float64), [1], 1)
    mean, cov = mean[:, 0], cov + np.diag([DRIFT**2] + [FADE**2] * len(spent))
    seen = np.r_[1.0, spent / (spent.sum() + besides)]
    spread = seen @ cov @ seen + NOISE**2 + (STALL / took) ** 2
    most, gain = BELIEVED * spread**0.5, cov @ seen / spread
    mean = mean + gain * np.clip(np.log(took / (spent.sum() + besides)) - mean[0], -most, most)
    cov = cov - np.outer(gain, seen @ cov)
    over = np.maximum(np.sqrt(np.diag(cov)) / ([PACE] + [PRICE] * len(spent)), 1.0)
    cov = cov / np.outer(over, over)
    rollouts = int(np.asarray(prices.rollouts)) + 1
    tries = (rollouts + 1) % TRIALS == 0 or rollouts in (1, 3, 7)
    hope = _doubts(cov[1:, 1:], int(spent[:-1].argmax())) if tries else np.zeros(len(spent))
    return prices.replace(
        known=np.c_[mean, cov].astype(np.float32), rollouts=np.int32(rollouts),
        factor=np.exp(np.stack([mean[1:], mean[1:] - hope])).astype(np.float32))


def _doubts(cov: np.ndarray, usual: int) -> np.ndarray:
    """f64[n - 1] the standard deviation of each bucket's error less that of the `usual` one."""
    found = np.sqrt(np.maximum(np.diag(cov) + cov[usual, usual] - 2 * cov[usual], 0.0))
    found[-1] = 0.0  # of drafts, which rounds of all other buckets have
    return found
