"""What tables of time get wrong, learned from whole launches.

The logarithm of a launch's seconds over what tables foresee is the pace of the machine, which
drifts, and the errors of the prices that it paid, each by its share of what was foreseen. A Kalman
filter (Kalman 1960) tells them apart. One bucket alone tells nothing: a slow bucket and a slow
machine are the same to see. So now and then a launch hopes that buckets of which little is known
are cheaper than was measured, and tries one that is then the best.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.control.cost import Ladders, Table
from specrl_jax.structs import Array

PACE = 0.3  # standard deviations, of logarithms: of the pace at first,
DRIFT = 0.02  # and of its change from one launch to the next
PRICE = 0.07  # of the error of a price at first, and at most,
FADE = 0.003  # and of its change from one launch to the next
NOISE = 0.03  # of a launch
BELIEVED = 3.0  # standard deviations of a surprise: what is spoilt counts as no more
HOPE = 16  # launches of a batch size after which one hopes; at first after 1, 3 and 7, too


@struct.dataclass
class Prices:
    """Logarithms of errors: of the pace, then of each batch size those of its buckets and drafts.

    By batch size, smallest first, `factor` f32[buckets + 1] is what the next launch multiplies its
    table with, and `launches` i32[] how many there were.
    """

    mean: Array  # f32[n]
    cov: Array  # f32[n, n]
    factor: dict[str, Array]
    launches: dict[str, Array]


def blank(ladders: Ladders) -> Prices:
    """Before any launch."""
    parts = sum(len(buckets) + 1 for buckets in ladders.values())
    return Prices(
        mean=np.zeros(1 + parts, np.float32),
        cov=np.diag([PACE**2] + [PRICE**2] * parts).astype(np.float32),
        factor={str(rows): np.ones(len(of) + 1, np.float32) for rows, of in ladders.items()},
        launches={str(rows): np.int32(0) for rows in ladders})


def pace(prices: Prices) -> float:
    """Seconds that the machine takes over those of the tables."""
    return float(np.exp(np.asarray(prices.mean[0])))


def corrected(prices: Prices, size: str, table: Table) -> Table:
    """The table of a batch size, pace apart; traced."""
    factor = jnp.asarray(prices.factor[size])
    return table.replace(verify=table.verify * factor[:-1, None], draft=table.draft * factor[-1],
                         catch_up=table.catch_up * factor[-1])


def learn(prices: Prices, size: str, foreseen: np.ndarray, besides: float, seconds: float
          ) -> Prices:
    """After a launch of the batch size `size`.

    Args:
      foreseen: f64[buckets + 1] seconds in each bucket, and of drafts, by the corrected table.
      besides: seconds foreseen that no price of these counts.
      seconds: that it took.
    """
    places = _places(prices.factor)
    place = places[size]
    mean, cov = np.asarray(prices.mean, np.float64), np.asarray(prices.cov, np.float64)
    cov = cov + np.diag([DRIFT**2] + [FADE**2] * (len(mean) - 1))
    known = foreseen / np.asarray(prices.factor[size]) * np.exp(mean[place])  # without hope
    total = known.sum() + besides
    seen = np.zeros(len(mean))
    seen[0], seen[place] = 1.0, known / total
    spread = seen @ cov @ seen + NOISE**2
    most, gain = BELIEVED * spread**0.5, cov @ seen / spread
    mean = mean + gain * np.clip(np.log(seconds / total) - mean[0], -most, most)
    cov = cov - np.outer(gain, seen @ cov)
    over = np.maximum(np.sqrt(np.diag(cov)) / ([PACE] + [PRICE] * (len(mean) - 1)), 1.0)
    cov = cov / np.outer(over, over)
    count = int(np.asarray(prices.launches[size])) + 1
    factor = {name: np.exp(mean[of]).astype(np.float32) for name, of in places.items()}
    if (count + 1) % HOPE == 0 or count in (1, 3, 7):
        usual = int(foreseen[:-1].argmax())
        factor[size] = np.exp(mean[place] - _hope(cov[place, place], usual)).astype(np.float32)
    return Prices(mean.astype(np.float32), cov.astype(np.float32), factor,
                  prices.launches | {size: np.int32(count)})


def _places(factor: Mapping[str, Array]) -> dict[str, slice]:
    """Where the prices of each batch size lie."""
    found, at = {}, 1
    for size in sorted(factor, key=int):
        found[size] = slice(at, at + len(factor[size]))
        at = found[size].stop
    return found


def _hope(cov: np.ndarray, usual: int) -> np.ndarray:
    """f64[parts] the standard deviation of each bucket's error less that of the `usual` one."""
    found = np.sqrt(np.maximum(np.diag(cov) + cov[usual, usual] - 2 * cov[usual], 0.0))
    found[-1] = 0.0  # of drafts, which are in the rounds of all buckets
    return found
