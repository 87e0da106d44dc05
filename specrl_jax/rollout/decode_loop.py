"""One launch, rounds in a compiled loop, for one data shard.

Like round.py, it runs inside `shard_map` over the data axes.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.rollout.plan import (
    Decoder,
    RoundPlan,
    blank_plan,
    buckets_of,
    frontier_of,
    plan_round,
)
from specrl_jax.rollout.round import (
    draft,
    drafted_round,
    keep,
    observe,
    plain_round,
)
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array, DrafterParams, Frontier, Params, RolloutState


class LoopState(NamedTuple):
    """Where a launch stands."""

    state: RolloutState
    done: Array  # i32[] rounds of earlier plans
    goes_on: Array  # bool[]
    planned: RoundPlan
    rounds: Array  # i32[] rounds that ran by this plan
    count: Array  # i32[B] tokens that they committed


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
    has_buckets = len(buckets_of(decoder, state.seq.shape[0])) > 1

    def goes_on(done: Array, state: RolloutState) -> Array:
        live = frontier_of(state).live.sum()
        free = (live < state.seq.shape[0]) & (waiting[0] > 0)
        most, refill = jax.lax.pmax((live, free.astype(jnp.int32)), ROWS)
        return (most > smaller) & (refill == 0) & (done < rounds)

    def draft_and_keep(loop: LoopState) -> LoopState:
        state, tree = draft(decoder, drafter_params, loop.state, loop.planned)
        return loop._replace(state=state, planned=keep(decoder, state, loop.planned, tree, force))

    def decode_plainly(loop: LoopState) -> LoopState:
        state, ran = plain_rounds(decoder, params, drafter_params, loop.state, loop.planned,
                                  rounds - loop.done)
        live = loop.planned.frontier.live
        return loop._replace(state=state, rounds=ran, count=jnp.where(live, ran, 0))

    def verify_and_commit(loop: LoopState) -> LoopState:
        state, count = drafted_round(decoder, params, drafter_params, loop.state, loop.planned)
        return loop._replace(state=state, rounds=jnp.int32(1), count=count)

    def one_plan(loop: LoopState) -> LoopState:
        planned = plan_round(decoder, loop.state, loop.planned.tree, waiting[0], force)
        loop = loop._replace(planned=planned, rounds=jnp.int32(0))
        if has_buckets:
            loop = run_if(planned.drafts, draft_and_keep, loop)
        plain = loop.planned.bucket == 0
        loop = run_if(plain, decode_plainly, loop)
        if has_buckets:
            loop = run_if(~plain, verify_and_commit, loop)
        # Not the loop's own plan and load: XLA reuses what it computed for these.
        ran = loop.planned.replace(plan=planned.plan, load=planned.load)
        state = observe(decoder, loop.state, ran, loop.count, loop.rounds)
        done = loop.done + loop.rounds
        return loop._replace(state=state, done=done, goes_on=goes_on(done, state))

    none = jnp.int32(0)
    start = LoopState(state, none, goes_on(none, state),
                      blank_plan(decoder, drafter_params, state, waiting[0], force), none,
                      jnp.zeros(state.root.shape, jnp.int32))
    return jax.lax.while_loop(lambda loop: loop.goes_on, one_plan, start).state


def run_if(condition: Array, body: Callable[[LoopState], LoopState], loop: LoopState) -> LoopState:
    """Runs `body` if `condition` bool[] holds.

    It is a loop that runs at most once, because XLA may copy the cache around a conditional, but
    never around a loop. The barrier makes the plan look as if it changed in the loop: XLA would
    compute whatever depends on the plan alone before the loop, whether it runs or not, up to the
    first layer's projections of all nodes and its attention.
    """
    def once(carry: tuple[Array, LoopState]) -> tuple[Array, LoopState]:
        _, loop = carry
        planned, rounds = jax.lax.optimization_barrier((loop.planned, loop.rounds))
        return jnp.bool_(False), body(loop._replace(planned=planned, rounds=rounds))

    return jax.lax.while_loop(lambda carry: carry[0], once, (condition, loop))[1]


def plain_rounds(decoder: Decoder, params: Params, drafter_params: DrafterParams,
                 state: RolloutState, planned: RoundPlan, limit: Array
                 ) -> tuple[RolloutState, Array]:
    """Runs plain rounds by one plan until a row of any shard ends, and at most `limit` i32[].

    Returns:
      The state, and how many rounds ran, i32[], at least 1.
    """
    valid_for = jnp.where(planned.drafts, 1, planned.plan.valid_for)

    def one(plain: PlainRounds) -> PlainRounds:
        state = plain_round(decoder, params, drafter_params, plain.state,
                            planned.replace(frontier=plain.frontier))
        frontier = frontier_of(state)
        ended = (frontier.live != planned.frontier.live).any().astype(jnp.int32)
        return PlainRounds(state, plain.rounds + 1, jax.lax.pmax(ended, ROWS), frontier)

    end = jax.lax.while_loop(
        lambda plain: (plain.rounds < jnp.minimum(valid_for, limit)) & (plain.ended == 0), one,
        PlainRounds(state, jnp.int32(0), jnp.int32(0), planned.frontier))
    return end.state, end.rounds
