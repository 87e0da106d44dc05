"""Writing the accepted path: the only place where a cache changes between prefills."""

from typing import Any

import jax.numpy as jnp

from specrl_jax.structs import Array, Cache, Frontier, Path, Sequences, Verdict


def append(cache: Cache, path: Path, count: Array) -> Cache:
    """Writes the first count[b] path entries of each row at its length."""
    return Cache(kv=cache.kv.append(path.kv, cache.length, count), length=cache.length + count)


def record(sequences: Sequences, verdict: Verdict, frontier: Frontier) -> Sequences:
    """Adds a round's tokens and log-probabilities to the sequences that the rows hold.

    What lies beyond the end is dropped. Indices are unique there, too: of others XLA makes a loop
    where results must repeat (XLA_FLAGS=--xla_gpu_deterministic_ops).
    """
    (total, buffer), (batch, width) = sequences.tokens.shape, verdict.tokens.shape
    seq = jnp.where(frontier.live, frontier.seq, total + jnp.arange(batch))
    within = jnp.arange(width)[None]
    column = jnp.where(within < verdict.count[:, None], frontier.generated[:, None] + within,
                       buffer + within)
    round_ = sequences.rounds.at[seq].get(mode="fill", fill_value=buffer)
    unique: dict[str, Any] = {"mode": "drop", "unique_indices": True}
    return Sequences(
        **{name: getattr(sequences, name).at[seq[:, None], column].set(
            getattr(verdict, name), **unique)
           for name in ("tokens", "logprob", "raw_logprob", "top_p_mass")},
        commits=sequences.commits.at[seq, round_].set(verdict.count, **unique),
        length=sequences.length.at[seq].add(verdict.count, **unique),
        rounds=sequences.rounds.at[seq].add(1, **unique),
        done=sequences.done.at[seq].set(verdict.stopped, **unique))
