"""One launch, rounds in a compiled loop, for one data shard.

As all of round.py, it runs inside `shard_map` over the data axes.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.draft.tree import roots
from specrl_jax.model.transformer import Params
from specrl_jax.rollout.round import (
    Machine,
    Turn,
    blank_tree,
    buckets_of,
    drafted_round,
    noted,
    plain_round,
    propose,
    tip_of,
    turn_of,
)
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array, DraftTree, RolloutState, Tip


class Ahead(NamedTuple):
    """Where a launch stands between two rounds."""

    done: Array  # i32[] rounds
    go: Array  # bool[] whether another follows
    state: RolloutState
    turn: Turn


class Spell(NamedTuple):
    """Where plain rounds of the same live rows stand."""

    done: Array  # i32[] rounds
    ended: Array  # i32[] whether a row of any shard has ended
    tip: Tip
    state: RolloutState


def launch(machine: Machine, params: Params, drafter_params: Params, state: RolloutState,
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

    def ahead(done: Array, state: RolloutState, tree: DraftTree) -> Ahead:
        turn = turn_of(machine, state, tree)
        live = turn.tip.live.sum()
        free = (live < state.seq.shape[0]) & (waiting[0] > 0)
        most, refill = jax.lax.pmax((live, free.astype(jnp.int32)), ROWS)
        return Ahead(done, (most > smaller) & (refill == 0) & (done < rounds), state, turn)

    def drafts(a: Ahead) -> Ahead:
        return Ahead(a.done, a.go, *propose(machine, drafter_params, a.state, a.turn))

    def plain(a: Ahead) -> Ahead:
        state, took = plain_spell(machine, params, drafter_params, a.state, a.turn, rounds - a.done)
        return ahead(a.done + took, state, a.turn.tree)

    def drafted(a: Ahead) -> Ahead:
        return ahead(a.done + 1, drafted_round(machine, params, drafter_params, a.state, a.turn),
                     a.turn.tree)

    def whilst(condition: Callable[[Turn], Array], one: Callable[[Ahead], Ahead], a: Ahead
               ) -> Ahead:
        return jax.lax.while_loop(lambda a: a.go & condition(a.turn), one, a)

    def plains(a: Ahead) -> Ahead:
        return whilst(lambda turn: ~turn.asks & (turn.bucket == 0), plain, a)

    def any_kind(a: Ahead) -> Ahead:
        a = plains(whilst(lambda turn: turn.asks, drafts, a))
        return whilst(lambda turn: ~turn.asks & (turn.bucket > 0), drafted, a)

    state = state.replace(control=machine.controller.start(state.control))
    if len(buckets_of(machine, state.seq.shape[0])) == 1:
        none = roots(state.root, jnp.zeros(state.root.shape, bool), machine.drafter.nodes)
        return plains(ahead(jnp.int32(0), state, none)).state
    start = ahead(jnp.int32(0), state, blank_tree(machine, drafter_params, state))
    return jax.lax.while_loop(lambda a: a.go, any_kind, start).state


def plain_spell(machine: Machine, params: Params, drafter_params: Params, state: RolloutState,
                turn: Turn, most: Array) -> tuple[RolloutState, Array]:
    """Plain rounds for which one plan stands: until a row of any shard ends, and at most `most`.

    Returns:
      The state, and the rounds i32[] that it took.
    """
    held = jnp.where(turn.spec.steps == 0, machine.controller.hold, 1)

    def one(spell: Spell) -> Spell:
        state = plain_round(machine, params, drafter_params, spell.state,
                            turn.replace(tip=spell.tip))
        tip = tip_of(state)
        ended = (tip.live != turn.tip.live).any().astype(jnp.int32)
        return Spell(spell.done + 1, jax.lax.pmax(ended, ROWS), tip, state)

    spell = jax.lax.while_loop(
        lambda s: (s.done < jnp.minimum(held, most)) & (s.ended == 0), one,
        Spell(jnp.int32(0), jnp.int32(0), turn.tip, state))
    count = jnp.where(turn.tip.live, spell.done, 0)
    return noted(machine, spell.state, turn, count, spell.done), spell.done
