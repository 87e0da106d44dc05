"""Made-up costs, loads and trees for tests of controllers, and one shard to run them in."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import ControlConfig, MeshConfig, SpecOptions
from specrl_jax.control import registry
from specrl_jax.control.buckets import Bucket, bucket_table
from specrl_jax.control.cost_model import CostTable, default_table
from specrl_jax.control.protocol import Controller, Limits, Outcome
from specrl_jax.structs import DraftTree, LaunchRecord, Load

BUCKETS = {8: (Bucket(8, 1), Bucket(16, 5), Bucket(32, 5)), 2: (Bucket(2, 1), Bucket(8, 5)),
           64: (Bucket(64, 1),)}
LADDER = (Bucket(4, 1), Bucket(4, 4), Bucket(8, 5), Bucket(16, 7), Bucket(28, 7))
LONGEST, DEPTH, NODES = 200, 4, 5
LIMITS = Limits(depth=DEPTH, branch=1, nodes=NODES, mix=(1.0,), buckets=BUCKETS, longest=LONGEST)
NEED_COSTS = ("respec", "budget")


def limits_of(batches: tuple[int, ...], nodes: int, depth: int, longest: int, branch: int = 1,
              max_packed: int = 64) -> Limits:
    """The limits of engines whose smallest batch drafts in no empty slots."""
    return LIMITS._replace(depth=depth, branch=branch, nodes=nodes, longest=longest, buckets={
        rows: bucket_table(rows, nodes, max_packed) for rows in batches})


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled, on the only shard of a mesh."""
    mesh = sharding.make_mesh(MeshConfig())
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(),
                                 axis_names=set(sharding.ROWS), check_vma=False))


@functools.cache
def controller(policy: str, **changes: Any) -> Controller:
    return registry.make(ControlConfig(policy=policy, **changes),
                         SpecOptions(max_depth=DEPTH, max_branch=1, max_nodes=NODES), LIMITS)


def made_up(wide: float = 0.1, step: float = 0.02, far: float = 0.0, catch_up: float = 0.0,
            limits: Limits = LIMITS) -> CostTable:
    """A plain round costs 1; each doubling of packed tokens, `wide`; a draft step, `step`.

    A long context adds `far` to what is verified beyond plain decoding, for each doubling.
    """
    table, reach = default_table(limits), np.asarray([0.0, 1.0])
    verify, steps = np.array(table.verify), np.arange(limits.depth + 1)
    for i, buckets in enumerate(limits.buckets.values()):
        packed = np.asarray([b.packed for b in (*buckets, *[buckets[-1]] * 9)][:verify.shape[1]])
        verify[i] = 1 + np.log2(packed / packed[0])[:, None] * (wide + far * reach)
    draft = np.broadcast_to(step * steps[:, None], table.draft.shape)
    return table.replace(verify=verify, draft=draft.astype(np.float32),
                         catch_up=np.full_like(table.catch_up, catch_up),
                         launch=np.zeros_like(table.launch))


def load(rows: int = 8, live: Any = None, length: int = 40, room: Any = 9, left: Any = 9,
         waiting: int = 0) -> Load:
    live = np.ones(rows, bool) if live is None else np.asarray(live)
    ones = np.ones(rows, np.float32)
    return Load(live=live, length=np.full(rows, length, np.int32),
                expected_left=np.asarray(left, np.float32) * ones,
                room=np.broadcast_to(np.int32(room), rows), waiting=np.int32(waiting))


def record(seconds: float = 1.0, batch: int = 8, **more: Any) -> LaunchRecord:
    counts = dict.fromkeys(("row_rounds", "committed", "drafted", "packed", "slots",
                            "draft_rounds", "draft_depth"), 0)
    return LaunchRecord(**({"batch": batch, "seconds": seconds, "last": False, "rounds": 1}
                           | counts | more))


def random_tree(rng: np.random.Generator, rows: int = 4, nodes: int = 7) -> DraftTree:
    """Live nodes closed under parent; survival falls along a path, with ties."""
    parent = np.zeros((rows, nodes), np.int32)
    live = np.zeros((rows, nodes), bool)
    survival = np.ones((rows, nodes), np.float32)
    live[:, 0] = rng.random(rows) < 0.8
    for b, n in itertools.product(range(rows), range(1, nodes)):
        parent[b, n] = rng.integers(0, n)
        live[b, n] = live[b, parent[b, n]] and rng.random() < 0.8
        survival[b, n] = survival[b, parent[b, n]] * rng.choice([1.0, 0.5, 0.5, 0.1, 0.0])
    whole, real = jnp.zeros((rows, nodes), jnp.int32), jnp.zeros((rows, nodes))
    return DraftTree(tokens=whole, parent=jnp.asarray(parent), depth=whole, rank=whole,
                     origin=whole, survival=jnp.asarray(survival), logq=real, draft_prob=real,
                     score_gap=real, live=jnp.asarray(live), broken=jnp.zeros(rows, bool))


def chains(survival: np.ndarray, live: Any = None, steps: int = DEPTH) -> DraftTree:
    """Chains whose nodes survive with survival f32[B, D]."""
    rows, depth = survival.shape
    level = np.broadcast_to(np.arange(depth + 1), (rows, depth + 1)).astype(np.int32)
    live = np.ones(rows, bool) if live is None else np.asarray(live)
    zero = np.zeros((rows, depth + 1), np.float32)
    return DraftTree(tokens=level, parent=np.maximum(level - 1, 0), depth=level, rank=0 * level,
                     origin=0 * level, logq=zero, draft_prob=zero, score_gap=zero,
                     survival=np.concatenate([zero[:, :1] + 1, survival], 1).astype(np.float32),
                     live=live[:, None] & (level <= steps), broken=np.zeros(rows, bool))


@functools.cache
def rounds_of(control: Controller) -> Callable[..., Any]:
    """One plan for 8 rows, compiled: a round, or `alike` ones where nothing is drafted."""
    def step(state: Any, of_round: Load, tree: DraftTree, drafted: Any, alike: Any) -> Any:
        plan = control.plan(state, of_round)
        level = jnp.arange(DEPTH + 1)[None]
        tree = tree.replace(live=tree.live & (level <= plan.spec.depth))
        kept, chosen = control.prune(state, plan, of_round, tree, BUCKETS[8])
        drafts = plan.spec.depth > 0
        live = jnp.where(drafts, kept, tree.live & (level == 0))
        bucket = jnp.where(drafts, chosen, 0)
        count = (jnp.cumprod(live & drafted, 1).sum(1) * of_round.live).astype(jnp.int32)
        ran = jnp.where(drafts, 1, jnp.minimum(alike, plan.valid_for))
        new = control.observe(state, plan, Outcome(of_round, tree, live, bucket, ran * count, ran))
        return new, ran, plan.spec.depth, bucket, live

    return alone(step)


def drive(control: Controller, state: Any, rounds: list[dict[str, Any]], valid_for: int = 32
          ) -> tuple[Any, list]:
    """Runs rounds, each with its `length`, `live` rows, tokens `left` and `accept`, the chance of
    each draft.

    A plan without drafts stands for the controller's rounds of an equal load, at most `valid_for`.

    Returns:
      the state, and (steps, bucket, live nodes, verified bool[B, N]) of each round.
    """
    step = rounds_of(control)
    rng, seen, compiled = np.random.default_rng(0), [], []
    while len(seen) < len(rounds):
        one, following = rounds[len(seen)], rounds[len(seen):len(seen) + valid_for]
        same = [all(np.array_equal(other.get(of), one.get(of)) for of in ("length", "live", "left"))
                for other in following]
        alike = (*same, False).index(False)
        survival = one["accept"] ** np.arange(1, DEPTH + 1) * np.ones((8, 1))
        drafted = np.concatenate([np.ones((8, 1), bool), rng.random((8, DEPTH)) < one["accept"]], 1)
        now = load(live=one.get("live"), length=one.get("length", 40), left=one.get("left", 1000))
        state, ran, steps, bucket, live = step(
            state, now, chains(survival, one.get("live")), drafted, np.int32(alike))
        compiled.append(step._cache_size())  # a state of NumPy's arrays is the first call's
        assert compiled[1:2] in ([], compiled[-1:]), "a load or a state compiled something"
        seen += [(int(steps), int(bucket), int(live.sum()), np.asarray(live))] * int(ran)
    return state, seen
