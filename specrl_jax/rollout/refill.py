"""Filling slots on the device: prefill of prompts, copies between slots, and smaller batches.

All functions see one data shard, inside `shard_map`.
"""

import jax
import jax.numpy as jnp

from specrl_jax.model import transformer
from specrl_jax.model.transformer import Params
from specrl_jax.rollout.round import Machine
from specrl_jax.structs import Array, Cache, Fill, RolloutState


def prefill(machine: Machine, width: int, params: Params, drafter_params: Params,
            state: RolloutState, fill: Fill, tokens: Array, length: Array) -> RolloutState:
    """Runs prompts once and writes their K/V to every slot that wants them.

    The last token of a prompt is not run: it is the first root, so nothing is sampled here.

    Args:
      width: widest prompt that a copy moves.
      tokens: i32[p, P'] prompts, right-padded.
      length: i32[p].
    """
    _, cached, taps = transformer.hidden_states(
        machine.arch, params, tokens, *transformer.right_padded(tokens.shape, length),
        taps=machine.drafter.taps)
    blocks = [(k.transpose(2, 0, 1, 3), v.transpose(2, 0, 3, 1)) for k, v in cached]
    features = None if taps is None else machine.drafter.project(drafter_params, taps)
    state = fork(machine, width, state, fill)
    kv = _write_rows(state.cache.kv, fill.source, lambda layer, at: _rows(blocks[layer], at),
                     tokens.shape[1])
    draft = machine.drafter.prefill(state.draft, fill, tokens, features)
    return state.replace(cache=state.cache.replace(kv=kv), draft=draft)


def fork(machine: Machine, width: int, state: RolloutState, fill: Fill) -> RolloutState:
    """Seats new sequences and copies prompts between slots."""
    kv = _write_rows(
        state.cache.kv, jnp.where(fill.copy == jnp.arange(fill.copy.shape[0]), -1, fill.copy),
        None, width)
    seated = fill.seq >= 0
    return state.replace(
        cache=Cache(kv=kv, length=jnp.where(seated, fill.length, state.cache.length)),
        root=jnp.where(seated, fill.root, state.root),
        seq=jnp.where(seated, fill.seq, state.seq),
        draft=machine.drafter.fork(state.draft, fill))


def _rows(block: tuple[Array, Array], at: Array) -> tuple[Array, Array]:
    return tuple(jax.lax.dynamic_slice_in_dim(a, at, 1, 0) for a in block)


def _write_rows(kv: list, source: Array, rows: object, width: int) -> list:
    """Overwrites the first `width` positions of slots with source >= 0.

    `rows(layer, index)` gives (k [1, G, E, width], v [1, G, width, E]); None reads slot `index`.
    """
    zero = jnp.int32(0)

    def first(k: Array, v: Array, b: Array) -> tuple[Array, Array]:
        at = (b, zero, zero, zero)
        return (jax.lax.dynamic_slice(k, at, (1, *k.shape[1:3], width)),
                jax.lax.dynamic_slice(v, at, (1, v.shape[1], width, v.shape[3])))

    def write(b: Array, kv: list) -> list:
        wanted, at, out = source[b] >= 0, jnp.maximum(source[b], 0), []
        for layer, (k, v) in enumerate(kv):
            new = first(k, v, at) if rows is None else rows(layer, at)
            pair = []
            for whole, old, value in zip((k, v), first(k, v, b), new, strict=True):
                value = jnp.where(wanted, value, old)
                pair.append(jax.lax.dynamic_update_slice(whole, value, (b, zero, zero, zero)))
            out.append(tuple(pair))
        return out

    return jax.lax.fori_loop(0, source.shape[0], write, kv)


def take(machine: Machine, state: RolloutState, slots: Array) -> RolloutState:
    """The state with only `slots` i32[B'], in that order."""
    kv = jax.tree.map(lambda a: a[slots], state.cache.kv)
    return state.replace(cache=Cache(kv=kv, length=state.cache.length[slots]),
                         root=state.root[slots], seq=state.seq[slots],
                         draft=machine.drafter.take(state.draft, slots))
