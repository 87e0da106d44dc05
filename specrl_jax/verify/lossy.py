"""Rules that change the policy, for experiments: what is gained by giving exactness up, and what
bugs do to it, published ones among them.

They are `rejection.walk` with one part exchanged. Every name begins with `lossy`, so that none is
chosen by accident; `tests/spec/test_museum.py` shows that the checks of exactness notice them. The
five of the second half are bugs on purpose: how far do they move a reward curve
(experiments/staleness.py --questions=bugs)?
"""

import functools

import jax.numpy as jnp
from jax.scipy.special import entr

from specrl_jax.config import check
from specrl_jax.prng import gumbel
from specrl_jax.structs import Array
from specrl_jax.verify.rejection import Test, coin, decide, emit, lossless, walk
from specrl_jax.verify.sampling import Processed, process

CONFIDENCE = 0.6  # of a drafter in its best guess, below which `lossy_retrospective` looks back


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


# Bugs. Arguments and results are those of `rejection.walk`.


def lossy_greedy(tokens: Array, parent: Array, rank: Array, live: Array, logp: Array, logq: Array,
                 key: Array, position: Array, depth: int) -> tuple[Array, Array, Array]:
    """Sampled requests verified by argmax: SGLang on ROCm (pull request 31214)."""
    best = jnp.arange(logp.shape[2])[None, None] == logp.argmax(2)[..., None]
    return walk(tokens, parent, rank, live, jnp.where(best, 0.0, -jnp.inf), logq, key, position,
                depth)


def lossy_accept_all(tokens: Array, parent: Array, rank: Array, live: Array, logp: Array,
                     logq: Array, key: Array, position: Array, depth: int
                     ) -> tuple[Array, Array, Array]:
    """Every draft is accepted: SGLang's accept threshold at 0 (a benchmark's injected fault)."""
    return walk(tokens, parent, rank, live, logp, logq, key, position, depth,
                lambda p, q, token: (jnp.ones(token.shape[0]), p, q))


def lossy_shared_noise(tokens: Array, parent: Array, rank: Array, live: Array, logp: Array,
                       logq: Array, key: Array, position: Array, depth: int
                       ) -> tuple[Array, Array, Array]:
    """u < p / q, and the residual is drawn with the noise that drew the children.

    vLLM's probabilistic drafts shared their Philox noise with the recovery draw (pull requests
    47386 and 54282). Sharing noise is exact only where acceptance is "iff equal". It is a bug only
    where the drafter's children are `perturbed`.
    """
    path, accepted, left = decide(tokens, parent, rank, live, logp, logq,
                                  functools.partial(coin, key, position), depth)
    noise = gumbel(key, position + accepted, jnp.arange(left.shape[1]))
    last = (jnp.log(left) + noise).argmax(1).astype(jnp.int32)
    return path, emit(tokens, path, accepted, last), accepted + 1


def lossy_retrospective(tokens: Array, parent: Array, rank: Array, live: Array, logp: Array,
                        logq: Array, key: Array, position: Array, depth: int
                        ) -> tuple[Array, Array, Array]:
    """A drafted token is not verified if the drafter is unsure of what follows it.

    Retrospective truncation: the schedule looks at the token before it decides to test it, which
    DSpark's paper warns of. Nodes that the drafter did not go on from are tested.
    """
    expanded = (logq > -jnp.inf).any(2)
    unsure = expanded & (logq.max(2) < jnp.log(CONFIDENCE))
    return walk(tokens, parent, rank, live & ~unsure.at[:, 0].set(False), logp, logq, key, position,
                depth)


def default_sampling(logits: Array, temperature: Array, top_k: Array | None, top_p: Array | None
                     ) -> Processed:
    """`lossy_default_sampling`: the target is processed with default settings, not those asked for.

    vLLM once did so with top-p and temperature (pull request 10198). Arguments: `sampling.process`.
    """
    return process(logits, jnp.ones_like(temperature), None, None)
