"""One launch, rounds in compiled loops, for one data shard.

Like round.py, it runs inside `shard_map` over the data axes. A launch alternates between a loop of
plain rounds and one of drafted rounds: as long as the controller plans the same kind, a round asks
the host of a GPU for one predicate, and a drafted one for its bucket. Caches change in loops only:
XLA may copy one around a conditional.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.rollout.plan import (
    Decoder,
    RoundPlan,
    Weights,
    buckets_of,
    frontier_of,
    no_draft,
    plan_round,
)
from specrl_jax.rollout.round import draft, drafted_round, observe, plain_round, prune
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array, DrafterParams, Frontier, Params, RolloutState


class LoopState(NamedTuple):
    """Where a launch stands."""

    state: RolloutState
    done: Array  # i32[] rounds so far
    goes_on: Array  # bool[]
    planned: RoundPlan  # the next round


class PlainRounds(NamedTuple):
    """Where plain rounds of the same live rows stand."""

    state: RolloutState
    rounds: Array  # i32[] so far
    ended: Array  # i32[] whether a row of any shard has ended
    frontier: Frontier


def launch(decoder: Decoder, params: Params, drafter_params: DrafterParams, state: RolloutState,
           waiting: Array, rounds: Array, smaller: Array, force: Array) -> RolloutState:
    """Runs rounds until the host is needed.

    It ends after `rounds`, when all rows are done, when any shard has a free slot and a waiting
    sequence, or when every shard's live rows fit the next smaller batch.

    Args:
      waiting: i32[1] sequences of this shard that have no slot yet.
      rounds: i32[] R.
      smaller: i32[] rows of the next smaller batch; 0 is none.
      force: i32[2] see `plan_round`.
    """
    weights = Weights(params, drafter_params)

    def then(state: RolloutState, done: Array) -> LoopState:
        live = frontier_of(state).live.sum()
        free = (live < state.seq.shape[0]) & (waiting[0] > 0)
        most, refill = jax.lax.pmax((live, free.astype(jnp.int32)), ROWS)
        goes_on = (most > smaller) & (refill == 0) & (done < rounds)
        return LoopState(state, done, goes_on, plan_round(decoder, state, waiting[0], force))

    def plainly(loop: LoopState) -> LoopState:
        planned = loop.planned
        state, ran = plain_rounds(decoder, weights, loop.state, planned, rounds - loop.done)
        count = jnp.where(planned.frontier.live, ran, 0)
        state = observe(decoder, state, planned, no_draft(decoder, planned), count, ran)
        return then(state, loop.done + ran)

    def with_drafts(loop: LoopState) -> LoopState:
        planned = loop.planned
        state, tree = draft(decoder, weights, loop.state, planned)
        pruned = prune(decoder, state, planned, tree, planned.force)
        state, count = drafted_round(decoder, weights, state, planned, pruned)
        state = observe(decoder, state, planned, pruned, count, jnp.int32(1))
        return then(state, loop.done + 1)

    def alternate(loop: LoopState) -> LoopState:
        loop = jax.lax.while_loop(lambda loop: loop.goes_on & ~loop.planned.drafts, plainly, loop)
        frontier = loop.planned.frontier
        drafts = frontier.replace(live=frontier.live & loop.goes_on)
        loop = loop._replace(state=loop.state.replace(draft=decoder.drafter.catch_up(
            drafter_params, loop.state.draft, drafts)))
        return jax.lax.while_loop(lambda loop: loop.goes_on & loop.planned.drafts, with_drafts,
                                  loop)

    drafts = len(buckets_of(decoder, state.seq.shape[0])) > 1
    return jax.lax.while_loop(lambda loop: loop.goes_on, alternate if drafts else plainly,
                              then(state, jnp.int32(0))).state


def plain_rounds(decoder: Decoder, weights: Weights, state: RolloutState, planned: RoundPlan,
                 limit: Array) -> tuple[RolloutState, Array]:
    """Runs plain rounds by one plan until a row of any shard ends, and at most `limit` i32[].

    Returns:
      The state, and how many rounds ran, i32[], at least 1.
    """
    most = jnp.minimum(planned.plan.valid_for, limit)

    def one(plain: PlainRounds) -> PlainRounds:
        state = plain_round(decoder, weights, plain.state,
                            planned.replace(frontier=plain.frontier))
        frontier = frontier_of(state)
        ended = (frontier.live != planned.frontier.live).any().astype(jnp.int32)
        return PlainRounds(state, plain.rounds + 1, jax.lax.pmax(ended, ROWS), frontier)

    end = jax.lax.while_loop(
        lambda plain: (plain.rounds < most) & (plain.ended == 0), one,
        PlainRounds(state, jnp.int32(0), jnp.int32(0), planned.frontier))
    return end.state, end.rounds
