"""Filling slots on the device: prefill of prompts, copies between slots, and smaller batches.

All functions see one data shard, inside `shard_map`.
"""

import jax.numpy as jnp

from specrl_jax.model import invariant, transformer
from specrl_jax.rollout import record
from specrl_jax.rollout.plan import Decoder
from specrl_jax.structs import (
    Array,
    Cache,
    DrafterParams,
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
        fresh, taps = invariant.prompt_forward(decoder.arch, params, tokens, decoder.drafter.taps)
    else:
        position, segment = transformer.right_padded((tokens.shape[0], tokens.shape[1]), length)
        _, fresh, taps = transformer.hidden_states(
            decoder.arch, params, tokens, position, segment, taps=decoder.drafter.taps)
    features = None if taps is None else decoder.drafter.project(drafter_params, taps)
    state = copy_prompt(decoder, width, state, fill)
    kv = state.cache.kv.fill(fill.source, fresh)
    draft = decoder.drafter.prefill(state.draft, fill, tokens, features)
    if state.records is not None:
        state = state.replace(records=record.prefill(state.records, fill, taps))
    return state.replace(cache=state.cache.replace(kv=kv), draft=draft)


def copy_prompt(decoder: Decoder, width: int, state: RolloutState, fill: SlotFill) -> RolloutState:
    """Seats new sequences and copies prompts between slots."""
    kv = state.cache.kv.copy(
        jnp.where(fill.copy == jnp.arange(fill.copy.shape[0]), -1, fill.copy), width)
    seated = fill.seq >= 0
    if state.records is not None:
        state = state.replace(records=record.copy_prompt(state.records, fill, state.seq, width))
    return state.replace(
        cache=Cache(kv=kv, length=jnp.where(seated, fill.length, state.cache.length)),
        root=jnp.where(seated, fill.root, state.root),
        seq=jnp.where(seated, fill.seq, state.seq),
        draft=decoder.drafter.copy_prompt(state.draft, fill))


def select_rows(decoder: Decoder, state: RolloutState, slots: Array) -> RolloutState:
    """Returns the state with only `slots` i32[B'], in that order."""
    kv = state.cache.kv.select(slots)
    return state.replace(cache=Cache(kv=kv, length=state.cache.length[slots]),
                         root=state.root[slots], seq=state.seq[slots],
                         draft=decoder.drafter.select_rows(state.draft, slots))
