"""The perturbed argmax in plain XLA operations, for any device; the CPU's default.

argmax(logp + G) with G = -log(E) is argmin(E / p): an exponential race. It shares exp(logp) with
the normaliser and saves the second logarithm. A CPU takes the vocabulary in chunks, so that a
chunk's noise stays in its cache. Devices that share a vocabulary agree on the highest score first:
the ranks of its tokens are then those of one device, bit for bit.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specrl_kernels import dispatch
from specrl_kernels.dispatch import Target
from specrl_kernels.gumbel_argmax.drawn import (
    Drawn,
    Threshold,
    finish,
    first_id,
    log_rank,
    scale_of,
)
from specrl_kernels.noise import exponential

CPU_CHUNK = 4096  # experiments/LOG.md


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; none changes the result beyond rounding."""

    chunk: int  # tokens at a time


def gumbel_argmax_xla(logits: jax.Array, temperature: jax.Array, key: jax.Array,
                      position: jax.Array, threshold: Threshold | None, *, count: int,
                      axis: str | None, target: Target) -> Drawn:
    """See `api.gumbel_argmax`."""
    vocab = logits.shape[1]
    size = _chunk(target, vocab)
    scale, greedy = scale_of(temperature)
    columns = logits.T.astype(jnp.float32)  # as a model's head makes them: undoes its caller's .T
    highest, first = columns.max(0), first_id(vocab, axis)
    if axis is not None:
        highest = jax.lax.pmax(highest, axis)
    top = highest * scale

    def chunk(total: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        start = jnp.minimum(i * size, vocab - size)  # the last chunk may overlap the one before
        own = start + jnp.arange(size)
        ids = first + own
        score = jax.lax.dynamic_slice_in_dim(columns, start, size, 0).T * scale[:, None]
        fresh = (own >= i * size)[None]
        score = jnp.where(fresh, score, -jnp.inf)
        mass = jnp.exp(score - top[:, None])
        rank = jnp.where(greedy[:, None], -score, exponential(key, position, ids) / mass
                         if count == 1 else log_rank(exponential(key, position, ids), mass,
                                                     score - top[:, None]))
        if threshold is not None:
            rank = jnp.where(fresh & threshold.keeps(score, ids[None]), rank, jnp.inf)
        # Plain reductions over a stored chunk: fused, the noise would be made for each of them, and
        # a CPU's argmin is not vectorised (experiments/LOG.md).
        rank, mass = jax.lax.optimization_barrier((rank, mass))
        return total + mass.sum(1), lowest(rank, ids[None], count)

    total, steps = jnp.zeros(len(logits)), -(-vocab // size)
    if steps == 1:
        total, (rank, token) = chunk(total, jnp.int32(0))
    else:
        total, best = jax.lax.scan(chunk, total, jnp.arange(steps))
        rank, token = (jnp.moveaxis(x, 0, 1).reshape(len(logits), -1) for x in best)
        rank, token = lowest(rank, token, count)
    # Not a number anywhere in a row: nothing is equal to its lowest rank.
    token = jnp.where(token < first + vocab, token, first).astype(jnp.int32)
    score = (jnp.take_along_axis(columns, (token - first).T, 0).T - highest[:, None]) * scale[
        :, None]
    if axis is not None:
        total, rank, token, score = _best_of_all(axis, total, rank, token, score)
    raced = jnp.where(greedy[:, None], jnp.where(jnp.isinf(rank), -jnp.inf, score),
                      -jnp.log(rank) if count == 1 else -rank)
    kept_mass = None if threshold is None else threshold.kept_mass
    return finish(raced, token, score, total, greedy, kept_mass)


def _chunk(target: Target, vocab: int) -> int:
    default = CPU_CHUNK if target.platform == "cpu" else vocab
    config = dispatch.configured(Config, {"chunk": default} | dict(target.config or {}))
    if config.chunk < 1:
        raise dispatch.Unsupported(f"{config}: at least one token")
    return min(config.chunk, vocab)


def _best_of_all(axis: str, total: jax.Array, rank: jax.Array, token: jax.Array, score: jax.Array
                 ) -> tuple[jax.Array, ...]:
    """Returns the sum of each device's `total` f[W], and the best of their candidates [W, K]."""
    numbers = jax.lax.all_gather(jnp.concatenate([total[:, None], rank, score], 1), axis)
    tokens = jax.lax.all_gather(token, axis)
    ranks, scores = jnp.split(numbers[..., 1:], 2, 2)
    of_row = lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1)  # noqa: E731
    ranks, scores, tokens = of_row(ranks), of_row(scores), of_row(tokens)
    best, chosen = lowest(ranks, tokens, token.shape[1])
    matches = chosen[:, :, None] == tokens[:, None]
    chosen = jnp.where(matches.any(2), chosen, 0)  # a row with something that is no number
    return (numbers[..., 0].sum(0), best, chosen,
            jnp.where(matches, scores[:, None], -jnp.inf).max(2))


def lowest(rank: jax.Array, token: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` lowest of ranks f[W, n] and their tokens i[1 or W, n], both [W, count].

    Equal ranks give the lower token. `top_k` would sort all of them on a CPU.
    """
    nobody = jnp.iinfo(jnp.int32).max
    ranks, tokens = [], []
    for i in range(count):
        if i:
            rank = jnp.where(token == tokens[-1], jnp.inf, rank)
        ranks.append(rank.min(1, keepdims=True))
        tokens.append(jnp.where(rank == ranks[-1], token, nobody).min(1, keepdims=True))
    return jnp.concatenate(ranks, 1), jnp.concatenate(tokens, 1)
