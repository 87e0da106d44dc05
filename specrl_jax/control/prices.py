"""What tables of time get wrong, learned from whole rollouts.

The launches of one batch size take the pace of the machine, which drifts, times what its table
foresees, with the errors of the prices that were paid. Of one setting alone both are the same to
see. So now and then a rollout takes buckets of which little is known to be cheaper than they are
believed to be, and tries one that is then the best. Whole rollouts are compared, and not launches,
because rows that end and contexts that grow, which tables know little of, are in all of them.
"""

import math
import operator
from collections.abc import Sequence

import numpy as np
from flax import struct

from specrl_jax.control.cost_model import Table
from specrl_jax.structs import Array

PACE = 0.3  # standard deviations, of logarithms: of the pace at first, and at most,
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
    rollouts, buckets = np.asarray(prices.rollouts).item(), len(prices.taken) - 1
    return buckets > 1 and (rollouts in EARLY or (rollouts + 1) % TRIALS == 0)


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


def learn(prices: Prices, table: Table, spent: Sequence[float], besides: float, took: float
          ) -> tuple[Prices, Table]:
    """After a rollout, by a Kalman filter (Kalman 1960): with the table for the next one.

    Args:
      table: as the rollout took it.
      spent: [n - 1] seconds foreseen of its prices, as believed.
      besides: of its launches.
      took: seconds.
    """
    foreseen = sum(spent) + besides
    if took <= 0 or sum(spent) <= 0:
        return prices, table
    mean, *columns = np.asarray(prices.known, np.float64).T.tolist()  # a handful: no arrays
    index, prior = range(len(mean)), [PACE, *[PRICE] * len(spent)]
    fades = [DRIFT, *[FADE] * len(spent)]
    cov = [[columns[j][i] + (i == j) * fades[i] ** 2 for j in index] for i in index]
    seen = [1.0, *(s / foreseen for s in spent)]
    along = [sum(map(operator.mul, row, seen)) for row in cov]
    spread = sum(map(operator.mul, seen, along)) + NOISE**2 + (STALL / took) ** 2
    surprise, limit = math.log(took / foreseen) - mean[0], BELIEVED * spread**0.5
    surprise = min(max(surprise, -limit), limit)
    mean = [m + a / spread * surprise for m, a in zip(mean, along, strict=True)]
    cov = [[cov[i][j] - along[i] * along[j] / spread for j in index] for i in index]
    over = [max(cov[i][i] ** 0.5 / prior[i], 1.0) for i in index]
    cov = [[cov[i][j] / (over[i] * over[j]) for j in index] for i in index]
    known = [[m, *row] for m, row in zip(mean, cov, strict=True)]
    after = prices.replace(known=np.asarray(known, np.float32),
                           rollouts=np.int32(np.asarray(prices.rollouts).item() + 1))
    wanted = [math.exp(m) for m in mean[1:]]
    if trial(after):
        usual = 1 + max(range(len(spent) - 1), key=spent.__getitem__)
        for i in index[1:-1]:  # a bucket is tried with its drafts, whatever these take
            variance = cov[i][i] + cov[usual][usual] - 2 * cov[usual][i]
            wanted[i - 1] *= math.exp(-max(variance, 0.0) ** 0.5)
    return _take(after, table, wanted)


def _take(prices: Prices, table: Table, wanted: Sequence[float]) -> tuple[Prices, Table]:
    """The table with `wanted` times the measured prices. A bucket costs no less than a smaller one:
    else it would be filled with drafts that nothing is expected of."""
    before = np.asarray(prices.taken, np.float64)
    change, verify = wanted / before, np.asarray(table.verify, np.float64)
    for i in range(1, len(verify)):
        change[i] = max(change[i], (change[i - 1] * verify[i - 1] / verify[i]).max())
    table = table.replace(verify=(verify * change[:-1, None]).astype(np.float32),
                          draft=(np.asarray(table.draft) * change[-1]).astype(np.float32),
                          catch_up=np.float32(np.asarray(table.catch_up) * change[-1]))
    return prices.replace(taken=(before * change).astype(np.float32)), table
