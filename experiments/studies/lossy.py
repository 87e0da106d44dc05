"""Rules that change the policy, for experiments: what giving up exactness gains, and what bugs do.

    python experiments/train.py --config.spec.rule=studies.lossy:TYPICAL

Each is `rejection.walk` with one part exchanged; arguments and results are those of
`rejection.walk`. `tests/verify/test_known_broken_rules.py` shows that the checks of exactness
notice them. The rules of the second half are bugs on purpose, most of them published ones, to
measure how far they move a reward curve (experiments/bench.py staleness --questions=bugs).
"""

import functools

import jax.numpy as jnp
from jax.scipy.special import entr

from specrl_jax.config import check
from specrl_jax.prng import gumbel
from specrl_jax.structs import Array
from specrl_jax.verify.protocol import Nodes
from specrl_jax.verify.rejection import Noise, coin, decide, emit, lossless, rule, walk
from specrl_jax.verify.sampling import Processed, process

CONFIDENCE = 0.6  # probability of the drafter's best guess below which `retrospective` prunes
Walked = tuple[Array, Array, Array]


def lenient(nodes: Nodes, logp: Array, logq: Array, noise: Noise, depth: int,
            lenience: float = 2.0) -> Walked:
    """Accepts with probability min(1, lenience * p / q); a lenience of 1 is the lossless rule.

    The lenience of Leviathan et al., arXiv 2211.17192, written as a factor of p / q; the residual
    stays norm(max(p - q, 0)). Raises a ConfigError below 1.
    """
    check(lenience >= 1, "lenience", lenience, "must be at least 1, which is lossless")

    def test(p: Array, q: Array, token: Array) -> Walked:
        chance, p, q = lossless(p, q, token)
        return lenience * chance, p, q

    return walk(nodes, logp, logq, noise, depth, test)


def typical(nodes: Nodes, logp: Array, logq: Array, noise: Noise, depth: int,
            epsilon: float = 0.09, delta: float = 0.3) -> Walked:
    """Accepts the first child with p(c) > min(epsilon, delta * exp(-H(p))), else draws from p.

    Typical acceptance of Medusa, arXiv 2401.10774. It needs no coin and ignores q. Raises a
    ConfigError for a threshold outside (0, 1].
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        check(0 < value <= 1, name, value, "must be above 0 and at most 1")

    def test(p: Array, q: Array, token: Array) -> Walked:
        chance = jnp.take_along_axis(p, token[:, None], 1)[:, 0]
        typical = chance > jnp.minimum(epsilon, delta * jnp.exp(-entr(p).sum(1)))
        return typical.astype(p.dtype), p, q

    return walk(nodes, logp, logq, noise, depth, test)


def greedy(nodes: Nodes, logp: Array, logq: Array, noise: Noise, depth: int) -> Walked:
    """Verifies sampled requests by argmax: SGLang on ROCm (pull request 31214)."""
    best = jnp.arange(logp.shape[2])[None, None] == logp.argmax(2)[..., None]
    return walk(nodes, jnp.where(best, 0.0, -jnp.inf), logq, noise, depth)


def accept_all(nodes: Nodes, logp: Array, logq: Array, noise: Noise, depth: int) -> Walked:
    """Accepts every draft: SGLang's accept threshold at 0 (a benchmark's injected fault)."""
    return walk(nodes, logp, logq, noise, depth,
                lambda p, q, token: (jnp.ones(token.shape[0]), p, q))


def shared_noise(nodes: Nodes, logp: Array, logq: Array, noise: Noise, depth: int) -> Walked:
    """Draws the residual with the noise that drew the children.

    vLLM's probabilistic drafts did (pull requests 47386 and 54282). It is a bug only if the
    drafter's children are `perturbed`: sharing noise is exact only if acceptance is "iff equal".
    """
    path, accepted, left = decide(nodes, logp, logq, functools.partial(coin, noise), depth)
    children = gumbel(noise.key, noise.position + accepted, jnp.arange(left.shape[1]))
    last = (jnp.log(left) + children).argmax(1).astype(jnp.int32)
    return path, emit(nodes, path, accepted, last), accepted + 1


def retrospective(nodes: Nodes, logp: Array, logq: Array, noise: Noise, depth: int) -> Walked:
    """Skips a drafted token if the drafter is unsure of the token after it.

    The schedule reads the token before it decides to test it, which DSpark's paper warns of. Nodes
    that the drafter did not expand are tested.
    """
    expanded = (logq > -jnp.inf).any(2)
    unsure = expanded & (logq.max(2) < jnp.log(CONFIDENCE))
    live = nodes.live & ~unsure.at[:, 0].set(False)
    return walk(nodes.replace(live=live), logp, logq, noise, depth)


def default_sampling(logits: Array, temperature: Array, top_k: Array | None, top_p: Array | None,
                     *, min_p: float = 0.0) -> Processed:
    """Ignores the request's truncation and temperature, as vLLM once did (pull request 10198)."""
    return process(logits, jnp.ones_like(temperature), None, None)


LENIENT = rule(lenient, lossless=False)
TYPICAL = rule(typical, lossless=False)
GREEDY = rule(greedy, lossless=False)
ACCEPT_ALL = rule(accept_all, lossless=False)
DEFAULT_SAMPLING = rule(lossless=False, process=default_sampling)
SHARED_NOISE = rule(shared_noise, lossless=False, needs_proposal=True)
RETROSPECTIVE = rule(retrospective, lossless=False, needs_proposal=True)
