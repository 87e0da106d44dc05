"""Lossless speculative sampling by rejection: the other rule behind `Verdict`.

A node's children are drawn from the drafter's distribution q without replacement (Gumbel top-k) and
tested in the order of their ranks. Child c is accepted with probability min(1, p(c) / q(c)); after
a rejection p becomes norm(max(p - q, 0)) and q loses c; when no child is left, the token is drawn
from what p has become, at a leaf from p itself. A chain is the tree of one child a node (Leviathan
et al., arXiv 2211.17192; Chen et al., 2302.01318); without replacement: Sequoia, 2402.12374.

It is exact only as long as
- coins and residual draws are independent of the noise that drew the children: they are hashes of
  indices that no vocabulary reaches, so the children may be drawn with the noise of `sampling`;
- what is verified does not depend on what was drawn: shape and live ranks (the first ones of each
  node) are fixed before the tokens are;
- p and q are what sampling uses, after temperature and truncation.
A sequence's position is decided once, in one round, so (key, position) needs no round number.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.prng import bits, gumbel
from specrl_jax.sharding import unsplit
from specrl_jax.structs import Array, Frontier, Sampling, Verdict
from specrl_jax.verify.match import truncate
from specrl_jax.verify.sampling import Processed, process

COINS = 1 << 31  # hash indices from here on: the coins of one position
RESIDUAL = 3 << 30  # and from here on: its residual draw, one index a token

Coin = Callable[[Array, Array], Array]
"""(level i32[B] of the node, tries i32[B] of its children so far) -> uniform f32[B] below 1"""

Test = Callable[[Array, Array, Array], tuple[Array, Array, Array]]
"""(p, q f32[B, V], token i32[B]) -> chance of acceptance f32[B]; p, q after a rejection"""

Walk = Callable[..., tuple[Array, Array, Array]]
"""A rule: arguments and results are those of `walk`."""


@struct.dataclass
class _Stand:
    """Where each row's walk stands."""

    at: Array  # i32[B] node
    level: Array  # i32[B] tokens accepted
    tries: Array  # i32[B] children of `at` tested
    untested: Array  # bool[B, n]
    path: Array  # i32[B, D+1]
    p: Array  # f32[B, V]
    q: Array  # f32[B, V]


def processed(logits: Array, temperature: Array, top_k: Array | None, top_p: Array | None
              ) -> Array:
    """Log-probabilities f32[W, V] of what `sampling.draw` draws from, whose arguments these are."""
    return process(logits, temperature, top_k, top_p).logp


def lossless(p: Array, q: Array, token: Array) -> tuple[Array, Array, Array]:
    """The test of the module's docstring.

    A child with q(c) = 0 was not drawn from q: it is tested as a point mass, which is exact however
    it was chosen. So q = 0 (logq = -inf) is right for a drafter without a distribution.
    """
    chosen = jnp.arange(p.shape[1])[None] == token[:, None]
    p_token, q_token = (jnp.where(chosen, x, 0).sum(1) for x in (p, q))
    drawn = q_token > 0
    chance = p_token / jnp.where(drawn, q_token, 1)
    left = jnp.maximum(p - jnp.where(drawn[:, None], q, chosen.astype(p.dtype)), 0)
    # Nothing is left only where rounding rejects what p = q accepts.
    return chance, _normalised(left, otherwise=p), without(q, token)


def without(q: Array, token: Array) -> Array:
    """q f32[B, V] with a token of each row removed, renormalised; all 0 if that was the last."""
    rest = jnp.where(jnp.arange(q.shape[1])[None] == token[:, None], 0, q)
    return _normalised(rest, otherwise=rest)


def _normalised(x: Array, otherwise: Array) -> Array:
    total = x.sum(1, keepdims=True)
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1), otherwise)


def coin(key: Array, position: Array, level: Array, tries: Array) -> Array:
    """f32[B] in (0, 1): the coin of the test number `tries` at position + level."""
    index = jnp.uint32(COINS) + tries.astype(jnp.uint32)
    word = jax.vmap(bits)(key, position + level, index[:, None])[:, 0]
    return jnp.minimum((word.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32),
                       jnp.float32(1 - 2.0**-24))  # never 1: p = q is always accepted


def last_token(left: Array, key: Array, position: Array) -> Array:
    """i32[B] drawn from f32[B, V], for i32[B] positions."""
    index = jnp.uint32(RESIDUAL) + jnp.arange(left.shape[1], dtype=jnp.uint32)
    return (jnp.log(left) + gumbel(key, position, index)).argmax(1).astype(jnp.int32)


def decide(tokens: Array, parent: Array, rank: Array, live: Array, logp: Array, logq: Array,
           coin: Coin, depth: int, test: Test = lossless) -> tuple[Array, Array, Array]:
    """Which nodes are accepted, for given coins; at most n - 1 tests a row.

    Args:
      tokens, parent, rank: i32[B, n]; live: bool[B, n].
      logp, logq: f32[B, n, V] at each node, of its token's successor; -inf is probability 0.
      depth: D; nodes deeper than that are not looked at.

    Returns:
      path i32[B, D+1] of nodes walked (the last one repeats), how many were accepted i32[B], and
      the distribution of the last token, f32[B, V].
    """
    batch, nodes = tokens.shape
    rows, node, step_of = jnp.arange(batch), jnp.arange(nodes)[None], jnp.arange(depth + 1)[None]

    def waiting(s: _Stand) -> Array:
        return s.untested & (parent == s.at[:, None]) & (s.level < depth)[:, None]

    def body(s: _Stand) -> _Stand:
        among = waiting(s)
        child = jnp.where(among, rank, jnp.iinfo(jnp.int32).max).argmin(1).astype(jnp.int32)
        chance, p, q = test(s.p, s.q, tokens[rows, child])
        tested = among.any(1)
        accepted = tested & (coin(s.level, s.tries) < chance)
        new, rejected = accepted[:, None], (tested & ~accepted)[:, None]
        return _Stand(
            at=jnp.where(accepted, child, s.at), level=s.level + accepted,
            tries=jnp.where(accepted, 0, s.tries + tested),
            untested=s.untested & ~(tested[:, None] & (node == child[:, None])),
            path=jnp.where(new & (step_of > s.level[:, None]), child[:, None], s.path),
            p=jnp.where(new, jnp.exp(logp[rows, child]), jnp.where(rejected, p, s.p)),
            q=jnp.where(new, jnp.exp(logq[rows, child]), jnp.where(rejected, q, s.q)))

    none = jnp.zeros(batch, jnp.int32)
    start = _Stand(at=none, level=none, tries=none, untested=live & (node > 0),
                   path=jnp.zeros((batch, depth + 1), jnp.int32), p=jnp.exp(logp[:, 0]),
                   q=jnp.exp(logq[:, 0]))
    end = jax.lax.while_loop(lambda s: waiting(s).any(), body, start)
    return end.path, end.level, end.p


def walk(tokens: Array, parent: Array, rank: Array, live: Array, logp: Array, logq: Array,
         key: Array, position: Array, depth: int, test: Test = lossless
         ) -> tuple[Array, Array, Array]:
    """The accepted path of each row and one token more.

    Args:
      key: u32[B, 2].
      position: i32[B] index of the token that follows the root; 0 is the first of the response.
      others: as in `decide`.

    Returns:
      path i32[B, D+1] of nodes walked (the last one repeats), emitted i32[B, D+1] tokens drawn
      there, and how many were emitted, i32[B] >= 1.
    """
    path, accepted, left = decide(tokens, parent, rank, live, logp, logq,
                                  functools.partial(coin, key, position), depth, test)
    last = last_token(left, key, position + accepted)
    return path, emit(tokens, path, accepted, last), accepted + 1


def emit(tokens: Array, path: Array, accepted: Array, last: Array) -> Array:
    """i32[B, D+1]: the path's tokens behind the root, then the last one, which repeats."""
    along = jnp.roll(jnp.take_along_axis(tokens, path, 1), -1, 1)
    within = jnp.arange(path.shape[1])[None] < accepted[:, None]
    return jnp.where(within, along, last[:, None])


def judge(
    tokens: Array,
    parent: Array,
    rank: Array,
    live: Array,
    target: Processed,
    logq: Array,
    place: Array,
    frontier: Frontier,
    sampling: Sampling,
    depth: int,
    rule: Walk = walk,
) -> Verdict:
    """The Verdict of one verification.

    Args:
      tokens, parent, rank, live: [B, n], the bucket's tree.
      target: at W packed positions.
      logq: f32[B, n, V], what each node's children were drawn from.
      place: i32[B, n] index in W.
    """
    logp, logq = unsplit(target.logp[place]), unsplit(logq)  # rows take their own number of tests
    path, emitted, count = rule(tokens, parent, rank, live, logp, logq, sampling.key,
                                frontier.generated, depth)
    at = jnp.take_along_axis(place, path, 1)
    logprob = target.logp[at, emitted]
    count, stopped = truncate(emitted, count, frontier, sampling)
    return Verdict(tokens=emitted, logprob=logprob, raw_logprob=logprob + target.raw[at],
                   top_p_mass=target.top_p_mass[at], path=path, count=count, stopped=stopped)
