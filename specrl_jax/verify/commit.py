"""Writing the accepted path: the only place where a cache changes between prefills."""

from typing import Any

import jax.numpy as jnp

from specrl_jax.structs import Array, Cache, Frontier, Path, Sequences, Verdict


def append(cache: Cache, path: Path, count: Array) -> Cache:
    """Writes the first count[b] path entries of each row at its length."""
    return Cache(kv=cache.kv.append(path.kv, cache.length, count), length=cache.length + count)


def record(sequences: Sequences, verdict: Verdict, frontier: Frontier) -> Sequences:
    """Adds a round's tokens and log-probabilities to the sequences that the rows hold.

    Fields [Q] are updated by comparison: a TPU writes a scatter's entries one after the other, and
    libtpu 0.0.42 aborts where a gather and a scatter share their indices. Fields [Q, T] are written
    at unique indices, also beyond the end, where writes are dropped: with repeated indices XLA
    makes a loop where results must repeat (XLA_FLAGS=--xla_gpu_deterministic_ops).
    """
    (total, buffer), (batch, width) = sequences.tokens.shape, verdict.tokens.shape
    seq = jnp.where(frontier.live, frontier.seq, total + jnp.arange(batch))
    within = jnp.arange(width)[None]
    column = jnp.where(within < verdict.count[:, None], frontier.generated[:, None] + within,
                       buffer + within)
    holds = seq[:, None] == jnp.arange(total)[None]  # [B, Q]
    round_ = jnp.where(holds, sequences.rounds[None], 0).sum(1)
    unique: dict[str, Any] = {"mode": "drop", "unique_indices": True}
    said = sequences.said
    if said is not None:
        new = jnp.where(within < verdict.count[:, None], verdict.tokens, said.shape[1])
        said = said.at[seq[:, None], new].set(True, mode="drop")
    return Sequences(
        **{name: getattr(sequences, name).at[seq[:, None], column].set(
            getattr(verdict, name), **unique)
           for name in ("tokens", "logprob", "raw_logprob", "top_p_mass")},
        commits=sequences.commits.at[seq, round_].set(verdict.count, **unique),
        length=sequences.length + jnp.where(holds, verdict.count[:, None], 0).sum(0),
        rounds=sequences.rounds + holds.sum(0, dtype=jnp.int32),
        done=sequences.done | (holds & verdict.stopped[:, None]).any(0), said=said)
