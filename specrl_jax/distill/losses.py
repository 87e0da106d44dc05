"""Losses of a drafter for one sequence; callers `vmap` over sequences.

They compare p, the actor's distribution, with q, the drafter's, over the draft vocabulary. q has no
mass elsewhere, and p is not renormalised: `sum min(p, q)` is then the true acceptance rate of
rejection sampling (LK losses, arXiv 2602.23881). A loss consists of a term for each depth and
token, a sum over depths, and a weight for each sequence.

Shapes: `J` draft depths, `Vd` draft vocabulary, `T` response tokens.
"""

import math
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.structs import Array

LK_RATE = 3.0  # eta of the LK paper's schedule
WEIGHT_RANGE = (0.1, 3.0)  # ReSpec clips its weights and does not give the range


# Losses of one depth of one sequence: log_p, log_q f32[Vd, T] -> f32[T].

def acceptance(log_p: Array, log_q: Array) -> Array:
    """Returns f32[T], how likely rejection sampling accepts a token: `sum min(p, q)` (Leviathan
    et al., arXiv 2211.17192, theorem 3.5)."""
    return jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)).sum(0)


def forward_kl(log_p: Array, log_q: Array) -> Array:
    """Returns KL(p || q), f32[T]: ReSpec (arXiv 2510.26475, algorithm 1); EAGLE-3's loss.

    It sums over the draft vocabulary only: p's mass outside would make it infinite.
    """
    return (jnp.exp(log_p) * (log_p - log_q)).sum(0)


def tv(log_p: Array, log_q: Array) -> Array:
    """Returns the total variation `1 - sum min(p, q)`, f32[T], over the whole vocabulary.

    It is the factor `TV_i` of arXiv 2606.12370, equation 13; `chained` is the equation.
    """
    return 1.0 - acceptance(log_p, log_q)


def jsd(log_p: Array, log_q: Array) -> Array:
    """Returns the Jensen-Shannon divergence, f32[T] (Lin, 1991, equation 3.5, weights 1/2), over
    the whole vocabulary: where q is 0, p contributes `p / 2 log 2`. At most log 2.
    """
    p, q, log_2 = jnp.exp(log_p), jnp.exp(log_q), math.log(2)
    log_m = jnp.logaddexp(log_p, log_q) - log_2
    inside = (p * (log_p - log_m) + q * (log_q - log_m)).sum(0)
    return 0.5 * (inside + (1.0 - p.sum(0)) * log_2)


def lk(log_p: Array, log_q: Array) -> Array:
    """Returns `l KL + (1 - l) TV`, f32[T], with `l = exp(-3 stop_gradient(alpha))`.

    The hybrid objective of arXiv 2602.23881. KL dominates while little is accepted and TV has
    almost no gradient. alpha is the token's own, so that micro-batches add up.
    """
    accepted = acceptance(log_p, log_q)
    mix = jnp.exp(-LK_RATE * jax.lax.stop_gradient(accepted))
    return mix * forward_kl(log_p, log_q) + (1.0 - mix) * (1.0 - accepted)


# Sums over depths: terms f32[J, T], mask bool[J, T], count f32[J], decay -> the sequence's f32[].

def decayed(terms: Array, mask: Array, count: Array, decay: float) -> Array:
    """Returns `sum_j decay^j mean_t terms[j, t]`: EAGLE-3's training-time test (arXiv 2503.01840)
    with the decay over depths of the LK losses (arXiv 2602.23881). `count`: tokens of each depth in
    the whole batch.
    """
    weight = decay ** jnp.arange(len(terms), dtype=jnp.float32) / count
    return (jnp.where(mask, terms, 0).sum(1) * weight).sum()


def chained(terms: Array, mask: Array, count: Array, decay: float) -> Array:
    """Returns end-to-end TV, arXiv 2606.12370, equation 13: `1 - mean_j prod_{i <= j} alpha_i`.

    The mean is over the depths of an anchor, which are fewer near the end of a sequence. `decay` is
    not read: depths are weighted by the probability of reaching them.
    """
    reached = jnp.ones_like(terms[0])
    total = jnp.zeros_like(reached)
    for alpha, live in zip(terms, mask, strict=True):
        reached = reached * jnp.where(live, alpha, 1.0)
        total = total + jnp.where(live, reached, 0)
    mean = total / jnp.maximum(mask.sum(0), 1)
    return jnp.where(mask[0], 1.0 - mean, 0).sum() / count[0]


# Weights of sequences: reward, advantage f32[...], live bool[...] -> f32[...].

def equal_weights(reward: Array, advantage: Array, live: Array) -> Array:
    return jnp.ones_like(reward)


def reward_weights(reward: Array, advantage: Array, live: Array) -> Array:
    """Returns w(r) of ReSpec (arXiv 2510.26475, algorithm 1): rewards over their mean, clipped.

    Rewards below 0, which the paper does not treat, are shifted to start at 0. All weights are 1 if
    no sequence has a reward.
    """
    lowest = jnp.minimum(jnp.where(live, reward, 0).min(), 0)
    return _clipped(reward - lowest, live)


def advantage_weights(reward: Array, advantage: Array, live: Array) -> Array:
    """Returns exp(advantage) over its mean, clipped: advantage-weighted regression, arXiv
    1910.00177, equation 6 with beta = 1.
    """
    return _clipped(jnp.exp(advantage), live)


def _clipped(value: Array, live: Array) -> Array:
    mean = jnp.where(live, value, 0).sum() / jnp.maximum(live.sum(), 1)
    return jnp.where(mean > 0, jnp.clip(value / jnp.where(mean > 0, mean, 1), *WEIGHT_RANGE), 1.0)


class Loss(NamedTuple):
    """The term of a depth and token, the sum over depths, and the weight of a sequence."""

    term: Callable[[Array, Array], Array]
    combine: Callable[[Array, Array, Array, float], Array] = decayed
    weigh: Callable[[Array, Array, Array], Array] = equal_weights


LOSSES = types.MappingProxyType({"forward_kl": Loss(forward_kl),
                                 "reward_weighted_kl": Loss(forward_kl, weigh=reward_weights),
                                 "advantage_weighted_kl": Loss(forward_kl, weigh=advantage_weights),
                                 "jsd": Loss(jsd), "tv": Loss(tv),
                                 "e2e_tv": Loss(acceptance, chained), "lk": Loss(lk)})
