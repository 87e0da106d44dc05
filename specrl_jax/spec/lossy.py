"""Rules that change the policy, for experiments: what is gained by giving exactness up.

They are `rejection.walk` with another test. Every name begins with `lossy`, so that none is chosen
by accident; `tests/spec/test_museum.py` shows that the checks of exactness notice them.
"""

import functools

import jax.numpy as jnp
from jax.scipy.special import entr

from specrl_jax.config import check
from specrl_jax.spec.rejection import Test, lossless, walk
from specrl_jax.structs import Array


def lossy_lenient(tokens: Array, parent: Array, rank: Array, live: Array, logp: Array, logq: Array,
                  key: Array, position: Array, depth: int, lenience: float = 2.0
                  ) -> tuple[Array, Array, Array]:
    """Accepts with probability min(1, lenience * p / q); 1 is the lossless rule.

    The lenience of Leviathan et al., arXiv 2211.17192, written as a factor of p / q; the residual
    stays norm(max(p - q, 0)). Other arguments and results: `rejection.walk`.

    Raises:
      ConfigError: lenience is below 1.
    """
    check(lenience >= 1, "lenience", lenience, "must be at least 1, which is lossless")
    return walk(tokens, parent, rank, live, logp, logq, key, position, depth,
                functools.partial(_lenient, lenience))


def _lenient(lenience: float, p: Array, q: Array, token: Array) -> tuple[Array, Array, Array]:
    chance, p, q = lossless(p, q, token)
    return lenience * chance, p, q


def lossy_typical(tokens: Array, parent: Array, rank: Array, live: Array, logp: Array, logq: Array,
                  key: Array, position: Array, depth: int, epsilon: float = 0.09,
                  delta: float = 0.3) -> tuple[Array, Array, Array]:
    """Accepts the first child with p(c) > min(epsilon, delta * exp(-H(p))), else draws from p.

    Typical acceptance of Medusa, arXiv 2401.10774. No coin is thrown, and q is not
    looked at. Other arguments and results: `rejection.walk`.

    Raises:
      ConfigError: a threshold is not within (0, 1].
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        check(0 < value <= 1, name, value, "must be above 0 and at most 1")
    return walk(tokens, parent, rank, live, logp, logq, key, position, depth,
                _typical(epsilon, delta))


def _typical(epsilon: float, delta: float) -> Test:
    def test(p: Array, q: Array, token: Array) -> tuple[Array, Array, Array]:
        entropy = entr(p).sum(1)
        chance = jnp.take_along_axis(p, token[:, None], 1)[:, 0]
        typical = chance > jnp.minimum(epsilon, delta * jnp.exp(-entropy))
        return typical.astype(p.dtype), p, q

    return test
