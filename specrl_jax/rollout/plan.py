"""What is static in a launch, and the plan of a round, for one data shard."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.control.buckets import Bucket, bucket_table
from specrl_jax.control.protocol import NEVER_REPLAN, Controller, Plan
from specrl_jax.draft.protocol import Drafter
from specrl_jax.draft.tree import roots
from specrl_jax.model.architecture import Architecture
from specrl_jax.structs import (
    Array,
    DrafterParams,
    DraftTree,
    Frontier,
    Load,
    Params,
    RolloutState,
    Sampling,
    SpecConfig,
)

MOST_MIX = 1000.0  # an endless factor of survival would hide roots, too
NOT_FORCED = -1  # in `force`: the controller decides


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static part of a launch: its program is a function of this and of shapes."""

    arch: Architecture
    drafter: Drafter
    controller: Controller
    max_packed: int = 64  # tokens that one verification may pack
    min_batch: int = 0  # smallest batch size, whose empty slots verify drafts; see bucket_table
    implementation: str | None = None  # of tree attention
    rule: str = "match"  # of verification, one of config.RULES
    invariant: bool = False  # see model/invariant.py
    truncates: bool = False  # whether a row may ask for top-k or top-p, or min_p is on
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    recorded: int | None = None  # origin of the drafter that learns from verification
    explore: int = 0  # one round of so many drafts whatever the controller plans; 0: none does


class Weights(NamedTuple):
    """The weights that a rollout reads."""

    actor: Params
    drafter: DrafterParams


def frontier_of(state: RolloutState) -> Frontier:
    """Returns where the rows stand; an empty slot holds the sequence index Q."""
    held = state.seq < state.sequences.done.shape[0]
    done = state.sequences.done.at[state.seq].get(mode="fill", fill_value=True)
    generated = state.sequences.length.at[state.seq].get(mode="fill", fill_value=0)
    return Frontier(root=state.root, seq=state.seq, generated=generated,
                    context=state.cache.length, live=held & ~done)


def sampling_of(state: RolloutState) -> Sampling:
    """Returns the sampling of the rows' sequences; that of an empty slot is of some sequence."""
    stop = state.sampling.stop
    rows = jax.tree.map(lambda a: a.at[state.seq].get(mode="clip"), state.sampling.replace(stop=()))
    return rows.replace(stop=stop)


def load_of(state: RolloutState, frontier: Frontier, rows: Sampling, waiting: Array) -> Load:
    """Returns what the controller sees. No row is expected to end at once, or beyond its limit."""
    expected = state.expected.at[state.seq].get(mode="fill", fill_value=1)
    left = (jnp.minimum(expected, rows.limit) - frontier.generated).astype(jnp.float32)
    return Load(live=frontier.live, length=frontier.context, expected_left=jnp.maximum(left, 1),
                room=rows.limit - frontier.generated, waiting=waiting)


class RoundPlan(struct.PyTreeNode):
    """A round that is about to run, or the first of several plain ones."""

    frontier: Frontier
    rows: Sampling
    load: Load
    plan: Plan
    clamped: Array  # bool[] whether the controller planned more than the shapes hold
    drafts: Array  # bool[] whether a tree is proposed first
    force: Array  # i32[2] see `plan_round`


class Pruned(struct.PyTreeNode):
    """Drafted trees and the nodes to verify; a plain round has none."""

    tree: DraftTree
    live: Array  # bool[B, N] the nodes to verify
    bucket: Array  # i32[] the same on all shards; 0 if only roots are left


def no_draft(decoder: Decoder, planned: RoundPlan) -> Pruned:
    """Returns the trees of a plain round as controllers see them: without a live node."""
    root = planned.frontier.root
    tree = roots(root, jnp.zeros(root.shape, bool), decoder.drafter.nodes)
    return Pruned(tree=tree, live=tree.live, bucket=jnp.int32(0))


def buckets_of(decoder: Decoder, batch: int) -> tuple[Bucket, ...]:
    """Returns the buckets of a batch size of a shard, smallest first."""
    return bucket_table(batch, decoder.drafter.nodes, decoder.max_packed,
                        batch == decoder.min_batch)


def plan_round(decoder: Decoder, state: RolloutState, waiting: Array, force: Array) -> RoundPlan:
    """Returns the plan of the next round.

    Args:
      waiting: i32[] sequences of this shard without a slot.
      force: i32[2] depth and bucket that replace the controller's; NOT_FORCED keeps its own.
    """
    frontier, rows = frontier_of(state), sampling_of(state)
    asks, until = explores(decoder, state.counters.rounds[0], force)
    force = jnp.where(asks, jnp.asarray([decoder.drafter.depth, NOT_FORCED], jnp.int32), force)
    load = load_of(state, frontier, rows, waiting)
    plan = decoder.controller.plan(state.control, load)
    spec, clamped = clamp(plan.spec, decoder.drafter, frontier.live.sum())
    room = len(buckets_of(decoder, frontier.root.shape[0])) > 1  # for more than roots
    free = force[0] == NOT_FORCED
    depth = jnp.where(free, spec.depth, jnp.minimum(force[0], decoder.drafter.depth))
    spec = spec.replace(depth=depth if room else jnp.zeros_like(depth))
    whole = asks | (force[1] != NOT_FORCED)  # trees, where rounds explore or are measured
    spec = spec.replace(branch=jnp.where(whole, decoder.drafter.branch, spec.branch),
                        nodes=jnp.where(whole, decoder.drafter.nodes, spec.nodes),
                        budget=jnp.where(asks, NEVER_REPLAN, spec.budget))
    plan = plan.replace(spec=spec, valid_for=jnp.maximum(
        jnp.minimum(jnp.where(free, plan.valid_for, NEVER_REPLAN), until), 1))
    return RoundPlan(frontier=frontier, rows=rows, load=load, plan=plan, clamped=clamped,
                     drafts=spec.depth > 0, force=force)


def explores(decoder: Decoder, rounds: Array, force: Array) -> tuple[Array, Array]:
    """Returns whether the round after `rounds` i32[] verifies whole trees, whatever the controller
    plans, and for how many rounds the answer is that of the next ones, too.

    A drafter that learns from verification must be asked now and then, however little the
    controller expects of it. Which rounds explore depends on nothing but their index.
    """
    if not decoder.explore:
        return jnp.bool_(False), jnp.int32(NEVER_REPLAN)
    since = rounds % decoder.explore
    return (force == NOT_FORCED).all() & (since == 0), decoder.explore - since


def clamp(spec: SpecConfig, drafter: Drafter, rows: Array) -> tuple[SpecConfig, Array]:
    """Returns a plan cut to what the shapes hold, and whether anything was cut, bool[].

    0 <= depth <= D, 1 <= branch <= K, 1 <= nodes <= N, factors of drafters in [0, MOST_MIX], so
    that no draft counts as much as a root, and a budget that holds the root of each of `rows`.
    """
    inside = spec.replace(
        depth=jnp.clip(spec.depth, 0, drafter.depth),
        branch=jnp.clip(spec.branch, 1, drafter.branch),
        nodes=jnp.clip(spec.nodes, 1, drafter.nodes), budget=jnp.maximum(spec.budget, rows),
        mix=jnp.where(spec.mix >= 0, jnp.minimum(spec.mix, MOST_MIX), 0))  # 0 if not a number, too
    changed = jax.tree.map(lambda a, b: (a != b).any(), spec, inside)
    return inside, jnp.stack(jax.tree.leaves(changed)).any()
