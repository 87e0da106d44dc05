"""What drafters with a cache of their own share: slots, keeping up with the actor, and rounds.

What was committed since they last drafted is processed in chunks before a tree grows; a round that
drafts nothing processes nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.draft.grow import attend, grow, no_proposal
from specrl_jax.draft.network import KV, Growth, Network
from specrl_jax.draft.protocol import Survive
from specrl_jax.draft.tree import roots
from specrl_jax.model.rows import for_rows
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array, DraftTree, Frontier, Sampling, SlotFill, SpecConfig

_MULTIPLE = 128  # cache positions that tree attention reads at once


@struct.dataclass
class Held:
    """What a network has processed; at and beyond `length` lies garbage, never read."""

    kv: KV  # of S' positions
    length: Array  # i32[B] positions processed
    hidden: Array  # f[B, F] output at the last of them


def chunk_of(depth: int) -> int:
    """Positions of each row that are processed at a time: at least what one round may commit."""
    return max(depth + 1, 8)


def places(cache: int, depth: int) -> int:
    """S' for an actor with `cache` = S: a chunk more, as what does not fit is moved, not cut."""
    return -(-(cache + chunk_of(depth)) // _MULTIPLE) * _MULTIPLE


# Slots.


def overwrite(whole: Array, source: Array, block: Callable[[Array, Array], Array]) -> Array:
    """Rows b with source[b] >= 0 begin with block(whole, source[b]), of shape [1, ...].

    A loop of slice updates: a scatter would copy the whole array (experiments/LOG.md).
    """

    def write(b: Array, at: Array, whole: Array) -> Array:
        start = (b, *(jnp.int32(0),) * (whole.ndim - 1))
        return jax.lax.dynamic_update_slice(whole, block(whole, at).astype(whole.dtype), start)

    return for_rows(source, write, whole)


def enter(whole: Array, fill: SlotFill, new: Array) -> Array:
    """Prefilled slots begin with their rows of new [p, ...]."""
    return overwrite(whole, fill.source,
                     lambda _, at: jax.lax.dynamic_slice_in_dim(new, at, 1, 0))


def copy(whole: Array, fill: SlotFill, width: int, axis: int = 1) -> Array:
    """Copied slots begin with the first `width` entries along `axis` of those they copy."""

    def block(whole: Array, at: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(whole, at, 1, 0)
        return jax.lax.slice_in_dim(row, 0, width, axis=axis)

    source = jnp.where(fill.copy == jnp.arange(fill.copy.shape[0]), -1, fill.copy)
    return overwrite(whole, source, block)


def copy_kv(kv: KV, fill: SlotFill, width: int) -> KV:
    return [(copy(k, fill, width, 3), copy(v, fill, width, 2)) for k, v in kv]


def known(length: Array, fill: SlotFill, ahead: int) -> Array:
    """i32[B] positions that slots have processed after copies, given those before.

    The source may have run on: only its prompt is the copy's too, and the output at the prompt's
    last position is gone, so at least that one is processed again.
    """
    shared = jnp.minimum(length[jnp.maximum(fill.copy, 0)], fill.length - ahead)
    return jnp.where(fill.copy >= 0, jnp.maximum(shared, 0), length)


def extend(whole: Array, at: Array, new: Array) -> Array:
    """Writes new [B, C, ...] into whole [B, S', ...] from position at[b] of each row on."""

    def write(b: Array, whole: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(new, b, 1, 0).astype(whole.dtype)
        return jax.lax.dynamic_update_slice(
            whole, row, (b, at[b], *(jnp.int32(0),) * (whole.ndim - 2)))

    return jax.lax.fori_loop(0, at.shape[0], write, whole)


# Rounds.


def propose(growth: Growth, params: Any, held: Held, tokens: Array, features: Array | None,
            frontier: Frontier, rows: Sampling, spec: SpecConfig, survive: Survive
            ) -> tuple[DraftTree, Held]:
    """Trees of what the network expects, or roots alone where nothing is asked for.

    What ends a loop or selects a branch is reduced over all data shards first.

    Args:
      tokens: i32[B, S' + 1] of each row, the prompt's first.
      features: f[B, S', F] of each position, if the network reads any.
    """
    chunk = chunk_of(growth.depth)
    wanted = (spec.steps > 0) & (jax.lax.pmax(frontier.live.any().astype(jnp.int32), ROWS) > 0)
    target = frontier.context + 1 - growth.network.ahead
    missing = jnp.where(frontier.live & wanted, target - held.length, 0)
    trips = jax.lax.pmax((missing.max() + chunk - 1) // chunk, ROWS)
    step = functools.partial(_catch_up, growth.network, chunk, params, tokens, features,
                             jnp.where(frontier.live, target, 0))
    held = jax.lax.fori_loop(0, trips, lambda _, held: step(held), held)
    tree = jax.lax.cond(
        wanted,
        lambda: grow(growth, params, held.kv, held.hidden.T, frontier, rows, spec, survive),
        lambda: roots(frontier.root, frontier.live, growth.nodes).replace(
            proposal=no_proposal(growth, params, frontier.root.shape[0])))
    return tree, held


def _catch_up(network: Network, chunk: int, params: Any, tokens: Array, features: Array | None,
              target: Array, held: Held) -> Held:
    """Processes up to `chunk` positions of each row, none beyond target i32[B]."""
    batch = target.shape[0]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    step = jnp.arange(chunk, dtype=jnp.int32)[None]
    packed = (jnp.repeat(row[:, 0], chunk), jnp.tile(step[0], batch))
    chain = jnp.broadcast_to(jnp.maximum(step - 1, 0), (batch, chunk))
    count = jnp.clip(target - held.length, 0, chunk)
    real, place = step < count[:, None], held.length[:, None] + step
    token = jnp.where(real, tokens[row, place + network.ahead], 0)
    given = None if features is None else jnp.moveaxis(
        jnp.where(real[..., None], features[row, place], 0), -1, 0)
    fresh: KV = []

    def look(index: int, q: Array, k: Array, v: Array) -> Array:
        fresh.append((k, v))
        new = (k.transpose(2, 3, 0, 1), v.transpose(2, 3, 0, 1))
        return attend(q, packed, new, chain, held.kv[index], held.length)

    out = network.run(params, token, given, place, look)
    # Nothing but finite numbers is cached: attention asks that of what it masks. It also makes
    # the write wait for the attention that reads the cache; unordered, XLA copies the cache.
    sound = jnp.isfinite(out).all(0)[None, None]
    last = jnp.take_along_axis(jnp.moveaxis(out, 0, -1), jnp.maximum(count - 1, 0)[
        :, None, None], 1)[:, 0]
    kv = [_append(*cached, held.length, jnp.where(sound, k, 0).transpose(2, 0, 1, 3),
                  jnp.where(sound, v, 0).transpose(2, 0, 3, 1))
          for cached, (k, v) in zip(held.kv, fresh, strict=True)]
    return Held(kv=kv, length=held.length + count, hidden=jnp.where(
        count[:, None] > 0, last.astype(held.hidden.dtype), held.hidden))


def _append(k: Array, v: Array, length: Array, new_k: Array, new_v: Array) -> tuple[Array, Array]:
    """Writes each row's new_k [B, G, E, C] and new_v [B, G, C, E] at its length."""
    zero = jnp.int32(0)

    def write(b: Array, kv: tuple[Array, Array]) -> tuple[Array, Array]:
        k, v = kv
        columns, lines = (jax.lax.dynamic_slice_in_dim(a, b, 1, 0) for a in (new_k, new_v))
        return (jax.lax.dynamic_update_slice(k, columns.astype(k.dtype),
                                             (b, zero, zero, length[b])),
                jax.lax.dynamic_update_slice(v, lines.astype(v.dtype),
                                             (b, zero, length[b], zero)))

    return jax.lax.fori_loop(0, length.shape[0], write, (k, v))
