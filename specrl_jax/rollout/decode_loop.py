"""One launch, rounds in a compiled loop, for one data shard.

As all of round.py, it runs inside `shard_map` over the data axes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.model.transformer import Params
from specrl_jax.rollout.round import (
    Decoder,
    Turn,
    blank_turn,
    buckets_of,
    drafted_round,
    frontier_of,
    noted,
    plain_round,
    propose,
    turn_of,
)
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array, Frontier, RolloutState


class Ahead(NamedTuple):
    """Where a launch stands within a turn."""

    done: Array  # i32[] rounds of earlier turns
    go: Array  # bool[] whether the launch goes on
    state: RolloutState
    turn: Turn
    took: Array  # i32[] rounds of this turn, all alike
    count: Array  # i32[B] tokens that they committed


class Spell(NamedTuple):
    """Where plain rounds of the same live rows stand."""

    done: Array  # i32[] rounds
    ended: Array  # i32[] whether a row of any shard has ended
    frontier: Frontier
    state: RolloutState


def launch(decoder: Decoder, params: Params, drafter_params: Params, state: RolloutState,
           waiting: Array, rounds: Array, smaller: Array) -> RolloutState:
    """Rounds until the host is needed.

    Drafts, plain rounds and rounds that verify drafts are loops of their own within one, so that
    none pays for what another does. Branches around them could copy the cache, which loops do not.
    Ends after `rounds`, when all rows are done, when any shard has a free slot and a waiting
    sequence, or when every shard's live rows fit the next smaller batch.

    Args:
      waiting: i32[1] sequences of this shard that have no slot yet.
      rounds: i32[] R.
      smaller: i32[] rows of the next smaller batch; 0 is none.
    """

    def goes(done: Array, state: RolloutState) -> Array:
        live = frontier_of(state).live.sum()
        free = (live < state.seq.shape[0]) & (waiting[0] > 0)
        most, refill = jax.lax.pmax((live, free.astype(jnp.int32)), ROWS)
        return (most > smaller) & (refill == 0) & (done < rounds)

    def drafts(a: Ahead) -> Ahead:
        a = _here(a)
        state, turn = propose(decoder, drafter_params, a.state, a.turn)
        return a._replace(state=state, turn=turn)

    def plain(a: Ahead) -> Ahead:
        a = _here(a)
        state, took = plain_spell(decoder, params, drafter_params, a.state, a.turn, rounds - a.done)
        return a._replace(state=state, took=took, count=jnp.where(a.turn.frontier.live, took, 0))

    def drafted(a: Ahead) -> Ahead:
        a = _here(a)
        state, count = drafted_round(decoder, params, drafter_params, a.state, a.turn)
        return a._replace(state=state, took=jnp.int32(1), count=count)

    def one_turn(a: Ahead) -> Ahead:
        first = turn_of(decoder, a.state, a.turn.tree)
        a = a._replace(turn=first, took=jnp.int32(0))
        if drafting:
            a = jax.lax.while_loop(lambda a: a.turn.asks, drafts, a)
        a = jax.lax.while_loop(lambda a: (a.took == 0) & (a.turn.bucket == 0), plain, a)
        if drafting:
            a = jax.lax.while_loop(lambda a: (a.took == 0) & (a.turn.bucket > 0), drafted, a)
        # What plan and note both compute XLA computes once, if it sees that the load is the same.
        turn = a.turn.replace(load=first.load, spec=first.spec)
        state = noted(decoder, a.state, turn, a.count, a.took)
        done = a.done + a.took
        return a._replace(done=done, go=goes(done, state), state=state)

    state = state.replace(control=decoder.controller.start(state.control))
    drafting = len(buckets_of(decoder, state.seq.shape[0])) > 1
    start = Ahead(jnp.int32(0), goes(jnp.int32(0), state), state,
                  blank_turn(decoder, drafter_params, state), jnp.int32(0),
                  jnp.zeros(state.root.shape, jnp.int32))
    return jax.lax.while_loop(lambda a: a.go, one_turn, start).state


def _here(a: Ahead) -> Ahead:
    """`a` in the body of a loop that may not run at all, as if the turn changed in it.

    What depends on the turn alone XLA would compute before the loop, each turn, whether it runs or
    not: up to the first layer's projections of all nodes, and its attention.
    """
    turn, took = jax.lax.optimization_barrier((a.turn, a.took))
    return a._replace(turn=turn, took=took)


def plain_spell(decoder: Decoder, params: Params, drafter_params: Params, state: RolloutState,
                turn: Turn, most: Array) -> tuple[RolloutState, Array]:
    """Plain rounds for which one plan stands: until a row of any shard ends, and at most `most`.

    Returns:
      The state, and the rounds i32[] that it took, at least 1.
    """
    def one(spell: Spell) -> Spell:
        state = plain_round(decoder, params, drafter_params, spell.state,
                            turn.replace(frontier=spell.frontier))
        frontier = frontier_of(state)
        ended = (frontier.live != turn.frontier.live).any().astype(jnp.int32)
        return Spell(spell.done + 1, jax.lax.pmax(ended, ROWS), frontier, state)

    spell = jax.lax.while_loop(
        lambda s: (s.done < jnp.minimum(turn.hold, most)) & (s.ended == 0), one,
        Spell(jnp.int32(0), jnp.int32(0), turn.frontier, state))
    return spell.state, spell.done
