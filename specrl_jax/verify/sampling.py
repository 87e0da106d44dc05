"""The actor's draw: y = argmax_v(logp[v] + G[v]) of the processed distribution.

Logits are [V, W], as the head makes them. The draw itself is the operation `gumbel_argmax`, which
devices that share a vocabulary run on their own parts of it. Truncation costs nothing where top_k
and top_p are None (a third of a small model's program is truncation), and on a CPU only in rounds
in which some row uses it.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from specrl_kernels.gumbel_argmax import Drawn, gumbel_argmax, scale_of
from specrl_kernels.head_argmax import head_argmax

from specrl_jax.sharding import TENSOR, in_tensor_parts, on_any_shard, straight_line, unsplit
from specrl_jax.structs import Array
from specrl_jax.verify import truncation
from specrl_jax.verify.protocol import Head

T = TypeVar("T")


class Draw(struct.PyTreeNode):
    token: Array  # i32[W]
    logprob: Array  # f32[W] after truncation and renormalisation; 0 at temperature 0
    raw_logprob: Array  # f32[W] at the row's temperature (1 at temperature 0), no truncation
    top_p_mass: Array  # f32[W] probability that top-k and top-p kept


class Processed(struct.PyTreeNode):
    """The distribution that `draw` draws from, at each packed position."""

    logp: Array  # f32[W, V] renormalised; -inf where truncation removed the token
    raw: Array  # f32[W] what a kept token's raw_logprob, as in Draw, is above its logp
    top_p_mass: Array  # f32[W]


def process(logits: Array, temperature: Array, top_k: Array | None, top_p: Array | None, *,
            min_p: float = 0.0) -> Processed:
    """Returns the distribution of `draw`, whose arguments these are; greedy is a point mass."""
    scale, greedy = scale_of(temperature)
    scores = logits * scale[None]
    ids = jnp.arange(logits.shape[0])[None]
    keep = _truncated_where_used(
        top_k, top_p, lambda scores, *by: truncation.threshold(
            unsplit(scores.T), *by, min_p=min_p).keeps(scores.T, ids),
        lambda scores: jnp.ones(scores.T.shape, bool), scores, min_p)
    mass = jnp.exp(scores - scores.max(0, keepdims=True)).T
    total, kept = mass.sum(1), jnp.where(keep, mass, 0).sum(1)
    best = (ids == scores.argmax(0)[:, None]).astype(mass.dtype)
    p = jnp.where(greedy[:, None], best, jnp.where(keep, mass, 0) / kept[:, None])
    return Processed(logp=jnp.log(p), raw=jnp.where(greedy, -jnp.log(total), jnp.log(kept / total)),
                     top_p_mass=kept / total)


def draw(logits: Array, temperature: Array, top_k: Array | None, top_p: Array | None, key: Array,
         position: Array, *, min_p: float = 0.0) -> Draw:
    """Draws one token for each of W positions.

    Processing: temperature, top-k, top-p of what top-k kept, min-p, renormalisation; ties by token
    id.

    Args:
      logits: f32[V, W].
      temperature, top_p: f32[W]; temperature 0 is argmax without noise.
      top_k: i32[W], 0 is off. None, as top_p then is: no position is truncated.
      key: u32[W, 2].
      position: i32[W] index of the token being drawn; 0 is the first of the response.
      min_p: see `truncation.threshold`; only with top_k and top_p.
    """
    rows, whole = (temperature, top_k, top_p, key, position), PartitionSpec()
    return in_tensor_parts(
        functools.partial(_draw_part, min_p), logits.shape[0],
        (PartitionSpec(TENSOR), jax.tree.map(lambda _: whole, rows)), whole)(logits, rows)


def draw_from_head(head: Head, temperature: Array, key: Array, position: Array) -> Draw:
    """Returns `draw`, without truncation, of a head's logits; kernels store none."""
    rows, whole = (temperature, key, position), PartitionSpec()

    def part(axis: str | None, hidden: Array, weights: Array, rows: tuple[Array, Array, Array]
             ) -> Draw:
        return _first(head_argmax(hidden, weights, *rows, axis=axis), jnp.ones_like(rows[0]))

    specs = (whole, PartitionSpec(TENSOR), (whole,) * 3)
    return in_tensor_parts(part, head.weights.shape[0], specs, whole)(
        head.hidden, head.weights, rows)


def _first(drawn: Drawn, top_p_mass: Array) -> Draw:
    return Draw(token=drawn.token[:, 0], logprob=drawn.logprob[:, 0],
                raw_logprob=drawn.raw_logprob[:, 0], top_p_mass=top_p_mass)


def _draw_part(min_p: float, axis: str | None, logits: Array,
               rows: tuple[Array, Array | None, Array | None, Array, Array]) -> Draw:
    """Computes `draw` from the logits f32[V, W] of a part, where `axis` splits the vocabulary."""
    temperature, top_k, top_p, key, position = rows

    def truncated(logits: Array, top_k: Array, top_p: Array) -> tuple[Drawn, Array]:
        scores = logits * scale_of(temperature)[0][None]
        edge = truncation.threshold(scores.T, top_k, top_p, axis, min_p)
        drawn = gumbel_argmax(logits.T, temperature, key, position, edge, axis=axis)
        return drawn, edge.kept_mass

    drawn, top_p_mass = _truncated_where_used(
        top_k, top_p, truncated, lambda logits: (gumbel_argmax(
            logits.T, temperature, key, position, axis=axis), jnp.ones_like(temperature)),
        logits, min_p)
    return _first(drawn, top_p_mass)


def _truncated_where_used(top_k: Array | None, top_p: Array | None,
                          truncated: Callable[[Array, Array, Array], T],
                          whole: Callable[[Array], T], logits: Array, min_p: float) -> T:
    """Runs `truncated` if any position of any data shard may be truncated, else `whole`."""
    if top_k is None or top_p is None:
        return whole(logits)
    if straight_line() or min_p:
        return truncated(logits, top_k, top_p)
    used = on_any_shard(((top_k > 0) | (top_p < 1)).any())
    return jax.lax.cond(used, lambda logits: truncated(logits, top_k, top_p), whole, logits)
