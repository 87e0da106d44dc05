"""Filling slots on the device: prefill of prompts and of begun responses, copies between slots, and
smaller batches.

All functions see one data shard, inside `shard_map`.
"""

import jax.numpy as jnp

from specrl_jax.model import invariant, transformer
from specrl_jax.rollout import record
from specrl_jax.rollout.plan import Decoder, Weights, frontier_of
from specrl_jax.rollout.round import along_path, commit_rows, packing_of
from specrl_jax.structs import (
    Array,
    Cache,
    DrafterParams,
    ModelParams,
    Path,
    RolloutState,
    SlotFill,
    Verdict,
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


def feed(decoder: Decoder, packed: int, params: ModelParams, drafter_params: DrafterParams,
         state: RolloutState, tokens: Array, count: Array, generated: Array) -> RolloutState:
    """Appends given response tokens to rows: to the cache and to what the drafter has read.

    Args:
      packed: W, most tokens of all rows.
      tokens: i32[B, C] that follow each row's root.
      count: i32[B] how many of them; 0 leaves a row as it is.
      generated: i32[B] response tokens up to the root.
    """
    frontier, width = frontier_of(state).replace(generated=generated), tokens.shape[1]
    index = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], tokens.shape)
    chain = jnp.concatenate([frontier.root[:, None], tokens[:, :-1]], 1)
    live, parent = index < count[:, None], jnp.maximum(index - 1, 0)
    packing = packing_of(live, parent, packed)
    _, kv, taps = transformer.tree_forward(
        decoder.arch, params, state.cache, chain[packing.row, packing.node],
        frontier.context[packing.row] + packing.node, packing, decoder.implementation,
        decoder.drafter.taps)
    if taps is not None:
        taps = jnp.moveaxis(decoder.drafter.project(drafter_params, taps, decode=True), 0, -1)
    path = Path(kv=along_path(kv, packing.place), draw=tokens, verified=live,
                taps=None if taps is None else taps[packing.place])
    nothing = jnp.zeros(tokens.shape, jnp.float32)
    verdict = Verdict(tokens=tokens, logprob=nothing, raw_logprob=nothing, top_p_mass=nothing,
                      path=index, count=count, stopped=count < 0)
    return commit_rows(decoder, Weights(params, drafter_params), state, frontier, verdict, path)


def select_rows(decoder: Decoder, state: RolloutState, slots: Array) -> RolloutState:
    """Returns the state with only `slots` i32[B'], in that order."""
    kv = state.cache.kv.select(slots)
    return state.replace(cache=Cache(kv=kv, length=state.cache.length[slots]),
                         root=state.root[slots], seq=state.seq[slots],
                         draft=decoder.drafter.select_rows(state.draft, slots))
