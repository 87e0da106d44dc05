"""Writing the accepted path: the only place where a cache changes between prefills."""

import jax.numpy as jnp

from specrl_jax.structs import Array, Cache, Frontier, Path, Sequences, Verdict


def append(cache: Cache, path: Path, count: Array) -> Cache:
    """Writes the first count[b] path entries of each row at its length."""
    return Cache(kv=cache.kv.append(path.kv, cache.length, count), length=cache.length + count)


def record(sequences: Sequences, verdict: Verdict, frontier: Frontier) -> Sequences:
    """Adds a round's tokens and log-probabilities to the sequences that the rows hold."""
    total, buffer = sequences.tokens.shape
    seq = jnp.where(frontier.live, frontier.seq, total)  # beyond the end: dropped
    within = jnp.arange(verdict.tokens.shape[1])[None]
    column = jnp.where(within < verdict.count[:, None], frontier.generated[:, None] + within,
                       buffer)
    round_ = sequences.rounds.at[seq].get(mode="fill", fill_value=buffer)
    return Sequences(
        **{name: getattr(sequences, name).at[seq[:, None], column].set(
            getattr(verdict, name), mode="drop")
           for name in ("tokens", "logprob", "raw_logprob", "top_p_mass")},
        commits=sequences.commits.at[seq, round_].set(verdict.count, mode="drop"),
        length=sequences.length.at[seq].add(verdict.count, mode="drop"),
        rounds=sequences.rounds.at[seq].add(1, mode="drop"),
        done=sequences.done.at[seq].set(verdict.stopped, mode="drop"))
