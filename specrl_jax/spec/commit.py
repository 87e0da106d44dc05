"""Writing the accepted path: the only place where a cache changes between prefills."""

import jax
import jax.numpy as jnp

from specrl_jax.structs import Array, Cache, Path, Sequences, Tip, Verdict


def append(cache: Cache, path: Path, count: Array) -> Cache:
    """Writes the first count[b] path entries of each row at its length.

    Slices are updated in a loop over rows, because a scatter copies the whole cache
    (experiments/LOG.md); plain decoding pays for one column a row.
    """
    zero = jnp.int32(0)

    def write(b: Array, d: Array, kv: list) -> list:
        at = cache.length[b] + d
        out = []
        for (k, v), (new_k, new_v) in zip(kv, path.kv, strict=True):
            column = jax.lax.dynamic_slice(new_k, (b, zero, zero, d), (1, *new_k.shape[1:3], 1))
            line = jax.lax.dynamic_slice(new_v, (b, zero, d, zero),
                                         (1, new_v.shape[1], 1, new_v.shape[3]))
            out.append((jax.lax.dynamic_update_slice(k, column, (b, zero, zero, at)),
                        jax.lax.dynamic_update_slice(v, line, (b, zero, at, zero))))
        return out

    def row(b: Array, kv: list) -> list:
        return jax.lax.fori_loop(0, count[b], lambda d, kv: write(b, d, kv), kv)

    kv = jax.lax.fori_loop(0, count.shape[0], row, cache.kv)
    return Cache(kv=kv, length=cache.length + count)


def record(sequences: Sequences, verdict: Verdict, tip: Tip) -> Sequences:
    """Adds a round's tokens and log-probabilities to the sequences that the rows hold."""
    total, buffer = sequences.tokens.shape
    seq = jnp.where(tip.live, tip.seq, total)  # beyond the end: dropped
    within = jnp.arange(verdict.tokens.shape[1])[None]
    column = jnp.where(within < verdict.count[:, None], tip.generated[:, None] + within, buffer)

    def put(target: Array, value: Array) -> Array:
        return target.at[seq[:, None], column].set(value, mode="drop")

    turn = sequences.rounds.at[seq].get(mode="fill", fill_value=buffer)
    return Sequences(
        tokens=put(sequences.tokens, verdict.tokens),
        logprob=put(sequences.logprob, verdict.logprob),
        raw_logprob=put(sequences.raw_logprob, verdict.raw_logprob),
        kept_mass=put(sequences.kept_mass, verdict.kept_mass),
        commits=sequences.commits.at[seq, turn].set(verdict.count, mode="drop"),
        length=sequences.length.at[seq].add(verdict.count, mode="drop"),
        rounds=sequences.rounds.at[seq].add(1, mode="drop"),
        done=sequences.done.at[seq].set(verdict.stopped, mode="drop"))
