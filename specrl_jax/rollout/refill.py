"""Filling slots on the device: prefill of prompts, copies between slots, and smaller batches.

All functions see one data shard, inside `shard_map`.
"""

import jax
import jax.numpy as jnp

from specrl_jax.model import invariant, transformer
from specrl_jax.model.rows import for_rows
from specrl_jax.rollout.plan import Decoder
from specrl_jax.structs import (
    Array,
    Cache,
    DrafterParams,
    KVCache,
    ModelParams,
    RolloutState,
    SlotFill,
)


def prefill(decoder: Decoder, width: int, params: ModelParams, drafter_params: DrafterParams,
            state: RolloutState, fill: SlotFill, tokens: Array, length: Array) -> RolloutState:
    """Runs prompts once and writes their K/V to every slot that `fill` assigns them to.

    The last token of a prompt is not run: it is the first root, so nothing is sampled here.

    Args:
      width: widest prompt that a copy moves.
      tokens: i32[p, P'] prompts, right-padded.
      length: i32[p].
    """
    if decoder.invariant:
        blocks, taps = invariant.prompt_forward(decoder.arch, params, tokens, decoder.drafter.taps)
    else:
        position, segment = transformer.right_padded((tokens.shape[0], tokens.shape[1]), length)
        _, cached, taps = transformer.hidden_states(
            decoder.arch, params, tokens, position, segment, taps=decoder.drafter.taps)
        blocks = [(k.transpose(2, 0, 1, 3), v.transpose(2, 0, 3, 1)) for k, v in cached]
    features = None if taps is None else decoder.drafter.project(drafter_params, taps)
    state = copy_prompt(decoder, width, state, fill)
    kv = _write_rows(state.cache.kv, fill.source, blocks, tokens.shape[1])
    draft = decoder.drafter.prefill(state.draft, fill, tokens, features)
    return state.replace(cache=state.cache.replace(kv=kv), draft=draft)


def copy_prompt(decoder: Decoder, width: int, state: RolloutState, fill: SlotFill) -> RolloutState:
    """Seats new sequences and copies prompts between slots."""
    kv = _write_rows(
        state.cache.kv, jnp.where(fill.copy == jnp.arange(fill.copy.shape[0]), -1, fill.copy),
        None, width)
    seated = fill.seq >= 0
    return state.replace(
        cache=Cache(kv=kv, length=jnp.where(seated, fill.length, state.cache.length)),
        root=jnp.where(seated, fill.root, state.root),
        seq=jnp.where(seated, fill.seq, state.seq),
        draft=decoder.drafter.copy_prompt(state.draft, fill))


def _write_rows(kv: KVCache, source: Array, rows: list[tuple[Array, Array]] | None, width: int
                ) -> KVCache:
    """Overwrites the first `width` positions of slots b with those of source[b] >= 0.

    Args:
      rows: (k [p, G, E, width], v [p, G, width, E]) a layer, to read from; None reads other slots.
    """

    def write(b: Array, at: Array, kv: KVCache) -> KVCache:
        return [_write_layer(b, at, segments, None if rows is None else rows[i], width)
                for i, segments in enumerate(kv)]

    return for_rows(source, write, kv)


def _write_layer(b: Array, source: Array, segments: tuple[list[Array], list[Array]],
                 rows: tuple[Array, Array] | None, width: int
                 ) -> tuple[list[Array], list[Array]]:
    out: tuple[list[Array], list[Array]] = ([], [])
    start = 0
    for i, k in enumerate(segments[0]):
        size = min(k.shape[3], width - start)
        for which, axis in ((0, 3), (1, 2)):
            whole = segments[which][i]
            if size > 0:
                new = (_positions(whole, source, 0, size, axis) if rows is None
                       else _positions(rows[which], source, start, size, axis))
                whole = jax.lax.dynamic_update_slice(whole, new, (b, *(jnp.int32(0),) * 3))
            out[which].append(whole)
        start += k.shape[3]
    return out


def _positions(a: Array, row: Array, start: int, size: int, axis: int) -> Array:
    """Returns row `row` of a [rows, G, ., .], cut to `size` positions along `axis`."""
    begin, shape = [row, 0, 0, 0], [1, *a.shape[1:]]
    begin[axis], shape[axis] = start, size
    return jax.lax.dynamic_slice(a, [jnp.int32(x) for x in begin], shape)


def select_rows(decoder: Decoder, state: RolloutState, slots: Array) -> RolloutState:
    """Returns the state with only `slots` i32[B'], in that order."""
    kv = jax.tree.map(lambda a: a[slots], state.cache.kv)
    return state.replace(cache=Cache(kv=kv, length=state.cache.length[slots]),
                         root=state.root[slots], seq=state.seq[slots],
                         draft=decoder.drafter.select_rows(state.draft, slots))
