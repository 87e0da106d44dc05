"""Lossless speculative sampling by rejection.

A node's children are drawn from the drafter's distribution q without replacement (Gumbel top-k) and
tested in the order of their ranks. Child c is accepted with probability min(1, p(c) / q(c)); after
a rejection p becomes norm(max(p - q, 0)) and q loses c. When no child is left, the token is drawn
from what p has become; at a leaf, from p itself. A chain is the tree with one child a node
(Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318); without replacement: Sequoia,
2402.12374.

The rule is exact only if
- coins and residual draws are independent of the noise that drew the children: their hash indices
  lie beyond every vocabulary, so children may be drawn with the noise of `sampling`;
- the verified nodes do not depend on the drawn tokens: shape and live ranks (the first ones of each
  node) are fixed before the tokens are;
- p and q include temperature and truncation.
A sequence's position is decided once, in one round, so (key, position) needs no round number.
"""

import functools
from collections.abc import Callable
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.prng import bits, gumbel
from specrl_jax.sharding import unsplit
from specrl_jax.structs import Array, Verdict
from specrl_jax.verify.protocol import Nodes, Rule, Target, cut_at_stop
from specrl_jax.verify.sampling import Processed, process

COINS = 1 << 31  # hash indices from here on: the coins of one position
RESIDUAL = 3 << 30  # and from here on: its residual draw, one index a token


class Noise(struct.PyTreeNode):
    key: Array  # u32[B, 2]
    position: Array  # i32[B] index of the token after the root; 0 is the response's first


Coin: TypeAlias = Callable[[Array, Array], Array]
"""(level i32[B] of the node, tries i32[B] of its children so far) -> uniform f32[B] below 1"""

Test: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Array, Array]]
"""(p, q f32[B, V], token i32[B]) -> acceptance probability f32[B]; p and q after a rejection"""

Walk: TypeAlias = Callable[[Nodes, Array, Array, Noise, int], tuple[Array, Array, Array]]  # `walk`


class Process(Protocol):
    def __call__(self, logits: Array, temperature: Array, top_k: Array | None, top_p: Array | None,
                 *, min_p: float = 0.0) -> Processed:
        """Returns the distributions to test drafts against; see `sampling.process`."""
        ...


class _Cursor(struct.PyTreeNode):
    at: Array  # i32[B] current node
    level: Array  # i32[B] accepted tokens
    tries: Array  # i32[B] tested children of `at`
    untested: Array  # bool[B, n]
    path: Array  # i32[B, D+1]
    p: Array  # f32[B, V]
    q: Array  # f32[B, V]


def lossless(p: Array, q: Array, token: Array) -> tuple[Array, Array, Array]:
    """Tests one child, see the module's docstring.

    A child with q(c) = 0 was not drawn from q and is tested as a point mass, which is exact however
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
    """Returns q f32[B, V] with one token of each row removed, renormalised; 0 if none is left."""
    rest = jnp.where(jnp.arange(q.shape[1])[None] == token[:, None], 0, q)
    return _normalised(rest, otherwise=rest)


def _normalised(x: Array, otherwise: Array) -> Array:
    total = x.sum(1, keepdims=True)
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1), otherwise)


def coin(noise: Noise, level: Array, tries: Array) -> Array:
    """Returns f32[B], the coin of test number `tries` at position + level."""
    index = jnp.uint32(COINS) + tries.astype(jnp.uint32)
    return uniform(jax.vmap(bits)(noise.key, noise.position + level, index[:, None])[:, 0])


def uniform(word: Array) -> Array:
    """Maps u32 words to f32 in (0, 1). Never 1, so that p = q is always accepted."""
    return jnp.minimum((word.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32),
                       jnp.float32(1 - 2.0**-24))


def last_token(left: Array, noise: Noise, accepted: Array) -> Array:
    """Draws i32[B] from f32[B, V], each behind `accepted` i32[B] tokens."""
    index = jnp.uint32(RESIDUAL) + jnp.arange(left.shape[1], dtype=jnp.uint32)
    scores = jnp.log(left) + gumbel(noise.key, noise.position + accepted, index)
    return scores.argmax(1).astype(jnp.int32)


def decide(nodes: Nodes, logp: Array, logq: Array, coin: Coin, depth: int, test: Test = lossless
           ) -> tuple[Array, Array, Array]:
    """Accepts and rejects nodes for given coins, in at most n - 1 tests a row.

    `logp` and `logq` f32[B, n, V] are of the token after each node, -inf is probability 0; nodes
    deeper than D = `depth` are not tested.

    Returns:
      path i32[B, D+1] of walked nodes (the last one repeats), accepted i32[B], and f32[B, V] the
      distribution of the last token.
    """
    (batch, size), parent = nodes.tokens.shape, nodes.parent
    rows, node, step_of = jnp.arange(batch), jnp.arange(size)[None], jnp.arange(depth + 1)[None]

    def waiting(s: _Cursor) -> Array:
        return s.untested & (parent == s.at[:, None]) & (s.level < depth)[:, None]

    def body(s: _Cursor) -> _Cursor:
        among = waiting(s)
        child = jnp.where(among, nodes.rank, jnp.iinfo(jnp.int32).max).argmin(1).astype(jnp.int32)
        chance, p, q = test(s.p, s.q, nodes.tokens[rows, child])
        tested = among.any(1)
        accepted = tested & (coin(s.level, s.tries) < chance)
        new, rejected = accepted[:, None], (tested & ~accepted)[:, None]
        return _Cursor(at=jnp.where(accepted, child, s.at),
                       level=s.level + accepted, tries=jnp.where(accepted, 0, s.tries + tested),
                       untested=s.untested & ~(tested[:, None] & (node == child[:, None])),
                       path=jnp.where(new & (step_of > s.level[:, None]), child[:, None], s.path),
                       p=jnp.where(new, jnp.exp(logp[rows, child]), jnp.where(rejected, p, s.p)),
                       q=jnp.where(new, jnp.exp(logq[rows, child]), jnp.where(rejected, q, s.q)))

    none = jnp.zeros(batch, jnp.int32)
    start = _Cursor(at=none, level=none, tries=none, untested=nodes.live & (node > 0),
                    path=jnp.zeros((batch, depth + 1), jnp.int32), p=jnp.exp(logp[:, 0]),
                    q=jnp.exp(logq[:, 0]))
    end = jax.lax.while_loop(lambda s: waiting(s).any(), body, start)
    return end.path, end.level, end.p


def walk(nodes: Nodes, logp: Array, logq: Array, noise: Noise, depth: int, test: Test = lossless
         ) -> tuple[Array, Array, Array]:
    """Returns the accepted path of each row and one token more.

    Args: see `decide`.

    Returns:
      path i32[B, D+1] of walked nodes (the last one repeats), emitted i32[B, D+1], and count
      i32[B] >= 1 how many were emitted.
    """
    path, accepted, left = decide(nodes, logp, logq, functools.partial(coin, noise), depth, test)
    last = last_token(left, noise, accepted)
    return path, emit(nodes, path, accepted, last), accepted + 1


def emit(nodes: Nodes, path: Array, accepted: Array, last: Array) -> Array:
    """Returns i32[B, D+1]: the path's tokens behind the root, then the last one, which repeats."""
    along = jnp.roll(jnp.take_along_axis(nodes.tokens, path, 1), -1, 1)
    within = jnp.arange(path.shape[1])[None] < accepted[:, None]
    return jnp.where(within, along, last[:, None])


def judge(nodes: Nodes, logq: Array, processed: Processed, target: Target, depth: int,
          walk: Walk = walk) -> Verdict:
    """Returns the Verdict for f32[B, n, V] `logq` of each node's children. Reads no logits."""
    place, noise = target.place, Noise(target.sampling.key, target.frontier.generated)
    # Whole on every device: rows need different numbers of tests.
    logp, logq = unsplit(processed.logp[place]), unsplit(logq)
    path, emitted, count = walk(nodes, logp, logq, noise, depth)
    at = jnp.take_along_axis(place, path, 1)
    logprob = processed.logp[at, emitted]
    count, stopped = cut_at_stop(emitted, count, target.frontier, target.sampling)
    return Verdict(tokens=emitted, logprob=logprob, raw_logprob=logprob + processed.raw[at],
                   top_p_mass=processed.top_p_mass[at], path=path, count=count, stopped=stopped)


def verify(nodes: Nodes, target: Target, depth: int, *, walk: Walk = walk,
           process: Process = process) -> tuple[Verdict, Array]:
    """Accepts and rejects nodes, then draws one token more; see protocol.Verify."""
    assert target.logits is not None  # as for all rules without draws_from_head
    processed = process(target.logits, *target.processing, min_p=target.min_p)
    batch, size = nodes.tokens.shape
    logq = jnp.full((batch, size, target.logits.shape[0]), -jnp.inf)  # where nothing was drawn
    if nodes.proposal is not None:
        logq = logq.at[..., nodes.proposal.vocab].set(nodes.proposal.logq)
    verdict = judge(nodes, logq, processed, target, depth, walk)
    walked = jnp.where(jnp.arange(verdict.path.shape[1])[None] < verdict.count[:, None],
                       verdict.path, size)  # the path's last node repeats: keep its first token
    emitted = jnp.zeros((batch, size), jnp.int32).at[
        jnp.arange(batch)[:, None], walked].set(verdict.tokens, mode="drop")
    return verdict, emitted


def rule(walk: Walk = walk, *, lossless: bool, needs_proposal: bool = False,
         process: Process = process) -> Rule:
    """Returns the Rule of a walk, whose distributions `process` computes from the logits."""
    return Rule(functools.partial(verify, walk=walk, process=process), lossless, needs_proposal)


RULE = rule(lossless=True)
RULE_DRAWN = rule(lossless=True, needs_proposal=True)
