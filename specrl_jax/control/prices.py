"""What tables of time get wrong, learned from whole rollouts.

The launches of one batch size take the pace of the machine, which drifts, times what its table
foresees, with the errors of the prices that were paid. Of one setting alone both are the same to
see. So now and then a rollout takes buckets of which little is known to be cheaper than they are
believed to be, and tries one that is then the best. Whole rollouts are compared, and not launches,
because rows that end and contexts that grow, which tables know little of, are in all of them.
"""

import numpy as np
from flax import struct

from specrl_jax.control.cost import Table
from specrl_jax.structs import Array

PACE = 0.3  # standard deviations, of logarithms: of the pace at first,
DRIFT = 0.02  # and of its change from one rollout to the next
PRICE = 0.07  # of the error of a price at first, and at most,
FADE = 0.003  # and of its change from one rollout to the next
NOISE = 0.02  # of a rollout's seconds,
STALL = 0.001  # s, and more
BELIEVED = 3.0  # standard deviations of a surprise: what is spoilt counts as no more
EARLY, TRIALS = (1, 3, 7), 16  # rollouts of a batch size after which one tries; every so many


@struct.dataclass
class Prices:
    """Of one batch size. Its n - 1 prices are those of its buckets, and that of drafts."""

    known: Array  # f32[n, 1 + n] means of the logarithms of pace and errors, and their covariance
    taken: Array  # f32[n - 1] the next rollout's prices over those that were measured
    rollouts: Array  # i32[] that were learned from


def blank(buckets: int) -> Prices:
    """Before any rollout, as host arrays."""
    parts = buckets + 1
    variance = np.diag([PACE**2] + [PRICE**2] * parts)
    return Prices(known=np.c_[np.zeros(1 + parts), variance].astype(np.float32),
                  taken=np.ones(parts, np.float32), rollouts=np.int32(0))


def trial(prices: Prices) -> bool:
    """Whether the next rollout tries what may be cheaper than it is believed to be."""
    rollouts = np.asarray(prices.rollouts).item()
    return rollouts in EARLY or (rollouts + 1) % TRIALS == 0


def doubted(prices: Prices) -> np.ndarray:
    """f64[n - 1] prices as they are believed to be, over those that the next rollout takes."""
    return np.exp(np.asarray(prices.known, np.float64)[1:, 0]) / np.asarray(prices.taken)


def measured(prices: Prices, table: Table) -> Table:
    """The table without what was learned."""
    taken = np.asarray(prices.taken)
    return table.replace(verify=np.asarray(table.verify) / taken[:-1, None],
                         draft=np.asarray(table.draft) / taken[-1],
                         catch_up=np.asarray(table.catch_up) / taken[-1])


def renewed(prices: Prices, table: Table, new: Table) -> tuple[Prices, Table]:
    """Once the table was read or measured anew: what was learned of the same one still holds."""
    old = measured(prices, table)
    same = all(np.allclose(a, b, rtol=1e-3, atol=0) for a, b in
               ((old.verify, new.verify), (old.draft, new.draft), (old.catch_up, new.catch_up)))
    return (prices, table) if same else (blank(len(new.packed)), new)


def learn(prices: Prices, table: Table, spent: np.ndarray, besides: float, took: float
          ) -> tuple[Prices, Table]:
    """After a rollout, by a Kalman filter (Kalman 1960): with the table for the next one.

    Args:
      table: as the rollout took it.
      spent: f64[n - 1] seconds foreseen of its prices, as believed.
      besides: of its launches.
      took: seconds.
    """
    foreseen = spent.sum() + besides
    if took <= 0 or spent.sum() <= 0:
        return prices, table
    mean, cov = np.split(np.asarray(prices.known, np.float64), [1], 1)
    mean, cov = mean[:, 0], cov + np.diag([DRIFT**2] + [FADE**2] * len(spent))
    seen = np.r_[1.0, spent / foreseen]
    spread = seen @ cov @ seen + NOISE**2 + (STALL / took) ** 2
    most, gain = BELIEVED * spread**0.5, cov @ seen / spread
    mean = mean + gain * np.clip(np.log(took / foreseen) - mean[0], -most, most)
    cov = cov - np.outer(gain, seen @ cov)
    over = np.maximum(np.sqrt(np.diag(cov)) / ([PACE] + [PRICE] * len(spent)), 1.0)
    cov = cov / np.outer(over, over)
    after = prices.replace(known=np.c_[mean, cov].astype(np.float32),
                           rollouts=np.int32(np.asarray(prices.rollouts) + 1))
    hope = _doubts(cov[1:, 1:], int(spent[:-1].argmax())) if trial(after) else 0.0
    return _take(after, table, np.asarray(prices.taken), np.exp(mean[1:] - hope))


def _doubts(cov: np.ndarray, usual: int) -> np.ndarray:
    """f64[n - 1] the standard deviation of each bucket's error less that of the `usual` one; a
    bucket is tried together with its drafts, whatever these take."""
    found = np.sqrt(np.maximum(np.diag(cov) + cov[usual, usual] - 2 * cov[usual], 0.0))
    found[-1] = 0.0
    return found


def _take(prices: Prices, table: Table, before: np.ndarray, wanted: np.ndarray
          ) -> tuple[Prices, Table]:
    """The table with wanted f64[n - 1] for `before` times what was measured. A bucket costs no less
    than a smaller one: else it would be filled with drafts that nothing is expected of."""
    change = wanted / before
    verify = np.asarray(table.verify, np.float64)
    for i in range(1, len(verify)):
        change[i] = max(change[i], (change[i - 1] * verify[i - 1] / verify[i]).max())
    table = table.replace(verify=(verify * change[:-1, None]).astype(np.float32),
                          draft=(np.asarray(table.draft) * change[-1]).astype(np.float32),
                          catch_up=np.float32(np.asarray(table.catch_up) * change[-1]))
    return prices.replace(taken=(before * change).astype(np.float32)), table
