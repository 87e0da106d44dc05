"""The interface of controllers, which choose the speculation configuration of each round.

A controller is five functions over an opaque state:

    init(costs) -> state                                         host, once
    plan(state, load) -> Plan                                    device, before a round
    prune(state, plan, load, tree, buckets) -> (live, bucket)    device, after drafting
    observe(state, plan, outcome) -> state                       device, after the round
    end_chunk(state, launch) -> (state, metrics)                 host, after each launch

Device functions run inside `shard_map` over the data axes. State, plan and bucket are equal on all
shards, so what is read of rows is reduced over `sharding.ROWS`. Shapes of a state never change.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.config import ControlConfig, SpecOptions
from specrl_jax.control.buckets import Bucket, BucketTable
from specrl_jax.sharding import ROWS
from specrl_jax.structs import (
    Array,
    ControlState,
    DraftTree,
    LaunchRecord,
    Load,
    PyTree,
    SpecConfig,
)

NEVER_REPLAN = 2**31 - 1  # rounds


class Plan(struct.PyTreeNode):
    """A decision about the next round. The rollout clamps `spec` to its shapes."""

    spec: SpecConfig
    valid_for: Array  # i32[] rounds for which a plan without drafts stands, unless a row ends
    notes: PyTree = ()  # what `prune` and `observe` reuse


class Outcome(NamedTuple):
    """One round, or several plain rounds of the same rows for which one plan stood."""

    load: Load  # when the first round began
    tree: DraftTree
    live: Array  # bool[B, N] verified nodes
    bucket: Array  # i32[] the same on all shards
    count: Array  # i32[B] committed tokens
    rounds: Array  # i32[]


class Limits(NamedTuple):
    """What the compiled shapes allow a controller to plan."""

    depth: int  # D
    branch: int  # K
    nodes: int  # N
    mix: tuple[float, ...]  # a factor for each drafter, as configured
    buckets: BucketTable
    longest: int  # tokens of context that a row may reach
    seed: int = 0
    platform: str = "cpu"  # or "gpu", "tpu": whose ratios hold until costs are measured


class Controller(NamedTuple):
    """Five functions, see above. Only `init` and `plan` have no default."""

    init: Callable[[PyTree], ControlState]  # from a CostTable, or None if nothing was measured
    plan: Callable[[ControlState, Load], Plan]
    prune: Callable[[ControlState, Plan, Load, DraftTree, Sequence[Bucket]],
                   tuple[Array, Array]] = (
        lambda state, plan, load, tree, buckets: prune_within(plan.spec, tree, buckets))
    observe: Callable[[ControlState, Plan, Outcome], ControlState] = (
        lambda state, plan, outcome: state)
    end_chunk: Callable[[ControlState, LaunchRecord], tuple[ControlState, Mapping[str, float]]] = (
        lambda state, launch: (state, {}))


ControllerFactory = Callable[[ControlConfig, SpecOptions, Limits], Controller]


def make_spec(depth: int, branch: int, nodes: int, budget: int,
              mix: Sequence[float] = (1.0,)) -> SpecConfig:
    """Returns a SpecConfig of constants; budget 0 is no limit, mix has a factor per drafter."""
    unlimited = jnp.iinfo(jnp.int32).max
    return SpecConfig(depth=jnp.int32(depth), branch=jnp.int32(branch), nodes=jnp.int32(nodes),
                      budget=jnp.int32(budget or unlimited),
                      mix=jnp.asarray(mix, jnp.float32))


def longest_context(load: Load) -> Array:
    """Returns f32[] the longest context of any live row: attention reads as far for all."""
    longest = jnp.where(load.live, load.length, 0).max()
    return jax.lax.pmax(longest, ROWS).astype(jnp.float32)


def mean_rows(load: Load) -> Array:
    """Returns f32[] live rows of a shard, on average over shards."""
    return jax.lax.pmean(load.live.sum().astype(jnp.float32), ROWS)


def mean_of_rows(load: Load, values: Array) -> Array:
    """Returns f32[] the mean of values [B] over the live rows of all shards."""
    total, rows = jax.lax.psum(
        (jnp.where(load.live, values, 0).astype(jnp.float32).sum(), load.live.sum()), ROWS)
    return total / jnp.maximum(rows, 1)


def prune_within(spec: SpecConfig, tree: DraftTree, buckets: Sequence[Bucket]
                 ) -> tuple[Array, Array]:
    """Keeps the likeliest nodes: at most `spec.nodes` a row, `spec.budget` in all, and what fits.

    Every live row's root is kept. Survival, the cumulative acceptance probability, never grows
    along a path and the sorts are stable, so parents come before children and the kept nodes are
    closed under parent.

    Returns:
      live bool[B, N]; the smallest bucket that holds them, i32[].
    """
    score = node_scores(tree, tree.survival)
    nodes = jnp.clip(spec.nodes, 1, buckets[-1].nodes)
    live = tree.live & (rank_in_row(score) < nodes)
    flat = jnp.where(live, score, -1.0).reshape(-1)
    order = jnp.argsort(-flat, stable=True)
    overall = jnp.zeros_like(order).at[order].set(jnp.arange(flat.shape[0]), unique_indices=True)
    budget = jnp.clip(spec.budget, live[:, 0].sum(), buckets[-1].packed)
    live &= overall.reshape(live.shape) < budget
    return live, smallest_bucket(live, buckets)


def node_scores(tree: DraftTree, value: Array) -> Array:
    """Returns f32[B, N]: `value` of live nodes, infinity for live roots, -1 for dead nodes."""
    score = jnp.where(tree.live, value, -1.0)
    return score.at[:, 0].set(jnp.where(tree.live[:, 0], jnp.inf, -1.0))


def rank_in_row(score: Array) -> Array:
    """Returns i32[B, N]: each entry's rank in its row by falling score, ties by index."""
    index = jnp.arange(score.shape[1])
    earlier = (index[None, :] < index[:, None])[None]
    mine, other = score[:, :, None], score[:, None, :]
    return ((other > mine) | ((other == mine) & earlier)).sum(2)


def smallest_bucket(live: Array, buckets: Sequence[Bucket]) -> Array:
    """Returns i32[] the first bucket that holds all live nodes; buckets are sorted by size."""
    total, widest = live.sum(), live.sum(1).max()
    fits = jnp.stack([(total <= b.packed) & (widest <= b.nodes) for b in buckets])
    return jnp.argmax(fits).astype(jnp.int32)
