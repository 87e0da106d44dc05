"""Writing the accepted path: the only place where a cache changes between prefills."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.structs import Array, Cache, Frontier, KVCache, Path, Sequences, Verdict


def append(cache: Cache, path: Path, count: Array) -> Cache:
    """Writes the first count[b] path entries of each row at its length."""
    kv = jax.lax.platform_dependent(cache.kv, path.kv, cache.length, count, cuda=write_by_scatter,
                                    rocm=write_by_scatter, default=write_by_loop)
    return Cache(kv=kv, length=cache.length + count)


def write_by_loop(kv: KVCache, new: Array, length: Array, count: Array) -> KVCache:
    """Updates one slice at a time, because a CPU's scatter copies the whole cache
    (experiments/LOG.md).

    Entries are sorted by the segment they go to, and each segment has its own loop over its entries
    alone; plain decoding pays for one entry a row.

    Args:
      new: f[D+1, L, 2, G, E, B] the path's keys and values.
      length: i32[B] where each row's first count[b] entries go; those that do not fit are dropped.
    """
    width = new.shape[0]
    sizes = [k.shape[3] for k in kv[0][0]]
    place = length[:, None] + jnp.arange(width)[None]
    within = jnp.arange(width)[None] < count[:, None]
    ends = jnp.cumsum(jnp.asarray(sizes))
    segment = jnp.where(within, (place[..., None] >= ends[None, None]).sum(-1), len(sizes))
    order = jnp.argsort(segment.reshape(-1), stable=True)
    bounds = (segment.reshape(-1)[None] < jnp.arange(len(sizes) + 1)[:, None]).sum(1)
    kv, start = [(list(k), list(v)) for k, v in kv], 0
    for i, size in enumerate(sizes):
        write = functools.partial(_write, new, order, place.reshape(-1) - start)
        part = jax.lax.fori_loop(bounds[i], bounds[i + 1], write, [(k[i], v[i]) for k, v in kv])
        for (k, v), (new_k, new_v) in zip(kv, part, strict=True):
            k[i], v[i] = new_k, new_v
        start += size
    return kv


def write_by_scatter(kv: KVCache, new: Array, length: Array, count: Array) -> KVCache:
    """Runs one kernel per array, for GPUs; arguments and result are those of `write_by_loop`.

    A loop would start two kernels for each entry and layer, and ask the host whether it ends.
    Indices are declared unique, or XLA_FLAGS=--xla_gpu_deterministic_ops would make such a loop.
    """
    width, batch = new.shape[0], new.shape[-1]
    row, step, start = jnp.arange(batch)[:, None], jnp.arange(width)[None], 0
    kv = [(list(k), list(v)) for k, v in kv]
    for i, size in enumerate(k.shape[3] for k in kv[0][0]):
        place = length[:, None] + step - start
        here = (step < count[:, None]) & (place >= 0) & (place < size)
        at = jnp.where(here, place, size + step)  # beyond the end: dropped
        for layer, (k, v) in enumerate(kv):
            column, line = (jnp.moveaxis(new[:, layer, j], -1, 0) for j in (0, 1))  # [B, D+1, G, E]
            k[i] = k[i].at[row, :, :, at].set(column, mode="drop", unique_indices=True)
            v[i] = v[i].at[row, :, at].set(line, mode="drop", unique_indices=True)
        start += size
    return kv


def _write(new: Array, order: Array, place: Array, step: Array,
           kv: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Writes entry order[step] of the path into one segment of every layer."""
    zero, width, (g, e) = jnp.int32(0), new.shape[0], new.shape[3:5]
    entry = order[step].astype(jnp.int32)
    b, d, at = entry // width, entry % width, place[entry]
    out = []
    for layer, (k, v) in enumerate(kv):
        column, line = (jax.lax.dynamic_slice(new, (d, layer, i, 0, 0, b), (1, 1, 1, g, e, 1))
                        for i in (0, 1))
        out.append((
            jax.lax.dynamic_update_slice(k, column.reshape(1, g, e, 1), (b, zero, zero, at)),
            jax.lax.dynamic_update_slice(v, line.reshape(1, g, 1, e), (b, zero, at, zero))))
    return out


def record(sequences: Sequences, verdict: Verdict, frontier: Frontier) -> Sequences:
    """Adds a round's tokens and log-probabilities to the sequences that the rows hold.

    What lies beyond the end is dropped. Indices are unique there, too: see `write_by_scatter`.
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
