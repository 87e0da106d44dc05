"""Made-up tables, loads and trees for the tests of controllers, and one shard to run them in."""

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
from specrl_jax.control.adaptive import HOLD, Adaptive
from specrl_jax.control.cost_model import Bucket
from specrl_jax.control.protocol import Controller, Outcome
from specrl_jax.structs import DraftTree, Load

LADDERS = {8: (Bucket(8, 1), Bucket(16, 5), Bucket(32, 5)), 2: (Bucket(2, 1), Bucket(8, 5)),
           64: (Bucket(64, 1),)}
LADDER = (Bucket(4, 1), Bucket(4, 4), Bucket(8, 5), Bucket(16, 7), Bucket(28, 7))
LONGEST, DEPTH, NODES = 200, 4, 5
ADAPTIVE = ("respec", "bandit", "budget", "oracle")
ACCEPT = (1.5, 1.9, 2.2)  # of the settings 1x1x2, 2x1x3, 4x1x5


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled, on the only shard of a mesh."""
    mesh = sharding.make_mesh(MeshConfig())
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(),
                                 axis_names=set(sharding.ROWS), check_vma=False))


@functools.cache
def controller(policy: str, **changes: Any) -> Controller:
    accept = ACCEPT if policy == "oracle" else ()
    return registry.make(ControlConfig(**({"policy": policy, "accept": accept} | changes)),
                       SpecOptions(max_depth=DEPTH, max_branch=1, max_nodes=NODES),
                       ladders=LADDERS, longest=LONGEST)


def priced(state: Adaptive, wide: float = 0.1, step: float = 0.02, far: float = 0.0,
           catch_up: float = 0.0) -> Adaptive:
    """A plain round takes 1; each doubling of packed tokens, `wide`; a draft step, `step`.

    A long context adds `far` to what is verified beyond plain decoding, for each doubling.
    """
    tables = {}
    for rows, table in state.tables.items():
        doublings = np.log2(table.packed / table.packed[0])[:, None]
        reach = np.linspace(0, 1, len(table.context))[None]
        steps = np.arange(table.draft.shape[0])[:, None]
        tables[rows] = table.replace(
            verify=(1 + doublings * (wide + far * reach)).astype(np.float32),
            draft=np.broadcast_to(step * steps, table.draft.shape).astype(np.float32),
            catch_up=np.float32(catch_up))
    return state.replace(tables=tables)


def load(rows: int = 8, live: Any = None, length: int = 40, weight: Any = None,
         room: Any = 9, left: float = 9) -> Load:
    live = np.ones(rows, bool) if live is None else np.asarray(live)
    ones = np.ones(rows, np.float32)
    return Load(live=live, length=np.full(rows, length, np.int32), expected_left=left * ones,
                room=np.broadcast_to(np.int32(room), rows),
                weight=ones if weight is None else np.asarray(weight, np.float32))


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
    whole = jnp.zeros((rows, nodes), jnp.int32)
    real = jnp.zeros((rows, nodes))
    return DraftTree(
        tokens=whole,
        parent=jnp.asarray(parent),
        depth=whole,
        rank=whole,
        origin=whole,
        survival=jnp.asarray(survival),
        logq=real,
        draft_prob=real,
        score_gap=real,
        live=jnp.asarray(live),
        broken=jnp.zeros(rows, bool),
    )


def chains(survival: np.ndarray, live: Any = None, steps: int = DEPTH) -> DraftTree:
    """Chains whose nodes survive with survival f32[B, D]."""
    rows, depth = survival.shape
    level = np.broadcast_to(np.arange(depth + 1), (rows, depth + 1)).astype(np.int32)
    live = np.ones(rows, bool) if live is None else np.asarray(live)
    zero = np.zeros((rows, depth + 1), np.float32)
    return DraftTree(
        tokens=level,
        parent=np.maximum(level - 1, 0),
        depth=level,
        rank=0 * level,
        origin=0 * level,
        survival=np.concatenate([zero[:, :1] + 1, survival], 1).astype(np.float32),
        logq=zero,
        draft_prob=zero,
        score_gap=zero,
        live=live[:, None] & (level <= steps),
        broken=np.zeros(rows, bool),
    )


@functools.cache
def rounds_of(control: Controller) -> Callable[..., Any]:
    """One plan for 8 rows, compiled: a round, or `alike` ones where nothing is drafted."""
    def step(state: Any, of_round: Load, tree: DraftTree, drafted: Any, alike: Any) -> Any:
        spec = control.plan(state, of_round)
        level = jnp.arange(DEPTH + 1)[None]
        tree = tree.replace(live=tree.live & (level <= spec.steps))
        live, bucket = control.keep(state, of_round, spec, tree, LADDERS[8])
        count = (jnp.cumprod(live & drafted, 1).sum(1) * of_round.live).astype(jnp.int32)
        took = jnp.where(spec.steps == 0, jnp.minimum(alike, control.hold(state, of_round)), 1)
        new = control.note(state, Outcome(of_round, spec, tree, live, bucket, took * count, took))
        return new, took, spec.steps, bucket, live

    return alone(step)


def drive(control: Controller, state: Any, rounds: list[dict[str, Any]], hold: int = HOLD
          ) -> tuple[Any, list]:
    """Runs rounds, each with its `length`, `live` rows, tokens `left` and `accept`, the chance of
    each draft.

    A plan without drafts stands for the controller's rounds of an equal load, at most `hold`.

    Returns:
      the state, and (steps, bucket, live nodes, verified bool[B, N]) of each round.
    """
    step = rounds_of(control)
    rng, seen, compiled = np.random.default_rng(0), [], []
    while len(seen) < len(rounds):
        one, following = rounds[len(seen)], rounds[len(seen):len(seen) + hold]
        same = [all(np.array_equal(other.get(of), one.get(of)) for of in ("length", "live", "left"))
                for other in following]
        alike = (*same, False).index(False)
        survival = one["accept"] ** np.arange(1, DEPTH + 1) * np.ones((8, 1))
        drafted = np.concatenate([np.ones((8, 1), bool), rng.random((8, DEPTH)) < one["accept"]], 1)
        now = load(live=one.get("live"), length=one.get("length", 40), left=one.get("left", 1000))
        state, took, steps, bucket, live = step(
            state, now, chains(survival, one.get("live")), drafted, np.int32(alike))
        compiled.append(step._cache_size())  # a state of NumPy's arrays is the first call's
        assert compiled[1:2] in ([], compiled[-1:]), "a load or a state compiled something"
        seen += [(int(steps), int(bucket), int(live.sum()), np.asarray(live))] * int(took)
    return state, seen
