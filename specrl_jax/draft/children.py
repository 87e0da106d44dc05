"""The children of a tree's nodes: the best tokens of the drafter's distribution.

Devices that share the drafter's vocabulary each find their best and compare them.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from specrl_jax.draft.network import Growth
from specrl_jax.prng import gumbel
from specrl_jax.sharding import TENSOR, in_tensor_parts, straight_line
from specrl_jax.structs import Array, Sampling

_KEY_DOMAIN = 0x5EED0DD5  # turns a row's key into one whose noise the match rule never uses
_ERROR_SCALE = 0.5  # error of the drafter's perturbed scores, as fitted to synthetic drafters


class Children(struct.PyTreeNode):
    """The K best tokens after each node, best first, [B, k, K]."""

    token: Array  # i32
    score: Array  # f32 by which they were chosen
    logq: Array  # f32
    draw_prob: Array  # f32 see `_draw_probability`; of perturbed scores only


def likeliest_children(growth: Growth, logits: Array, vocab: Array, rows: Sampling, position: Array
                       ) -> tuple[Children, Array | None]:
    """Returns each node's best tokens and, for drawn trees, log-probabilities f32[B, k, Vd].

    The noise is that of the draw that decides between the children. Tokens that `growth.truncate`
    removes have a score of -inf. Without it a row's truncation is not applied: of EAGLE heads, a
    lower draft.temperature gained nearly as much, without a search at each node
    (experiments/LOG.md, 2026-11-23).

    Args:
      logits: f32[Vd, B, k]; vocab: i32[Vd] token ids.
      position: i32[B] index of the children's draw; 0 is the response's first.
    """
    part, whole = PartitionSpec(TENSOR), PartitionSpec()
    every = PartitionSpec(None, None, TENSOR) if growth.drawn else None
    best = in_tensor_parts(
        functools.partial(_best, growth), vocab.shape[0],
        (part, part, jax.tree.map(lambda _: whole, rows), whole), (whole, every))
    if growth.children == "sampled":
        rows = rows.replace(key=rows.key ^ jnp.uint32(_KEY_DOMAIN))
    return best(logits, vocab, rows, position)


def _best(growth: Growth, axis: str | None, logits: Array, vocab: Array, rows: Sampling,
          position: Array) -> tuple[Children, Array | None]:
    """Computes `likeliest_children` from a part of the vocabulary, if `axis` splits it."""
    temperature = rows.temperature
    scale = jnp.where(temperature == 0, 0.0, 1.0)
    heat = jnp.where(scale > 0, temperature * growth.temperature, 1.0)
    logits = jnp.moveaxis(logits, 0, -1) / heat[:, None, None]
    if growth.truncate is not None:
        flat = logits.reshape(-1, logits.shape[-1])
        k, p = (jnp.repeat(row, logits.shape[1]) for row in (rows.top_k, rows.top_p))
        kept = growth.truncate(flat, k, p, axis).keeps(flat, vocab[None])
        logits = jnp.where(kept.reshape(logits.shape), logits, -jnp.inf)
    logq = (jax.nn.log_softmax(logits) if axis is None else
            logits - _log_total(logits, axis))
    ranked = logq if growth.children == "top" else (
        logq + (scale[:, None] * gumbel(rows.key, position, vocab))[:, None])
    score, at = highest(ranked, growth.branch)
    token, chosen = vocab[at], jnp.take_along_axis(logq, at, 2)
    if axis is not None:
        score, token, chosen = (jax.lax.all_gather(a, axis, axis=2, tiled=True)
                                for a in (score, token, chosen))
        score, at = highest(score, growth.branch)
        token, chosen = (jnp.take_along_axis(a, at, 2) for a in (token, chosen))
    return Children(token, score, chosen, _draw_probability(score, ranked, scale, axis)), (
        logq if growth.drawn else None)


def _log_total(x: Array, axis: str | None) -> Array:
    """Returns the logarithm of the sum of exp(x) over the whole vocabulary, f32[..., 1]."""
    own = jax.nn.logsumexp(x, -1, keepdims=True)
    if axis is None:
        return own
    return jax.nn.logsumexp(jax.lax.all_gather(own, axis, axis=own.ndim - 1, tiled=True), -1,
                            keepdims=True)


def highest(scores: Array, count: int) -> tuple[Array, Array]:
    """Returns the highest along the last axis and their indices, the first of equals first.

    `top_k` would make a CPU sort the whole vocabulary when there is more than one row.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)

    def pick(left: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        best = left.max(-1, keepdims=True)
        at = jnp.where(left == best, index, scores.shape[-1]).min(-1, keepdims=True)
        return jnp.where(index == at, -jnp.inf, left), (best[..., 0], at[..., 0])

    _, (best, at) = jax.lax.scan(pick, scores, None, length=count, unroll=straight_line())
    return jnp.moveaxis(best, 0, -1), jnp.moveaxis(at, 0, -1)


def _draw_probability(best: Array, ranked: Array, scale: Array, axis: str | None) -> Array:
    """Returns f32[B, k, K], how likely each child is to be the actor's draw, given the noise.

    The actor's perturbed scores are the drafter's plus errors. With Gumbel errors of one scale, the
    highest is distributed as a softmax of the drafter's scores over that scale. The drafter's own
    probability, right in greedy rows, is too low elsewhere: the noise has chosen already.
    """
    sharp = jnp.where(scale > 0, 1 / _ERROR_SCALE, 1.0)[:, None, None]
    return jnp.exp(best * sharp - _log_total(ranked * sharp, axis))
