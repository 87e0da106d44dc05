"""Controllers: who chooses the speculation configuration of each round.

A controller is pure functions over an opaque state, whose arrays have entries of four bytes. `plan`
and `hold` (before a round), `keep` (after a draft) and `note` (after verification) run on the
device, as does `start`; the others run on the host between launches.
`off` and `fixed` are here; what looks at time is in adaptive.py and the files it names.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specrl_jax.control.cost_model import Bucket
from specrl_jax.structs import Array, DraftTree, Load, SpecConfig

FOREVER = 2**31 - 1  # rounds


class Outcome(NamedTuple):
    """What `note` sees: a round, or plain rounds of the same rows for which one plan stood."""

    load: Load  # when it began
    spec: SpecConfig
    tree: DraftTree
    live: Array  # bool[B, N] verified nodes
    bucket: Array  # i32[] the same on all shards
    count: Array  # i32[B] tokens committed
    rounds: Array  # i32[]


class Stretch(NamedTuple):
    """Rounds in which the same rows are live."""

    batch: int  # rows of a shard
    rounds: int
    context: float  # of a live row, on average


class Controller(NamedTuple):
    """`init() -> state`, `plan(state, load) -> SpecConfig`, `keep(state, load, spec, tree, buckets)
    -> (live bool[B, N], bucket i32[])`, `update(state, launch) -> state`.

    Those below change nothing unless `adaptive`. The state and what selects a branch or a depth are
    equal on all data shards.
    """

    init: Callable[[], Any]
    plan: Callable[[Any, Load], SpecConfig]
    keep: Callable[[Any, Load, SpecConfig, DraftTree, tuple[Bucket, ...]], tuple[Array, Array]]
    update: Callable[[Any, Any], Any]
    note: Callable[[Any, Outcome], Any] = lambda state, outcome: state
    explain: Callable[[Any, Any], dict[str, Any]] = lambda state, launch: {}  # of the last launch
    weigh: Callable[[Any, int, np.ndarray], np.ndarray] = (
        lambda state, batch, left: np.ones_like(left))  # rows, from tokens still to come f32[rows]
    weighs: bool = False  # whether it does not weigh all rows alike
    depth: Callable[[Any, int | None], Any] = (
        lambda state, steps: state)  # drafts to that depth whatever is planned; None: as planned
    begin: Callable[[Any, int], Any] = (
        lambda state, prompt: state)  # on the host, when a rollout of prompts up to so long begins
    end: Callable[[Any, Sequence[Mapping[str, Any]], Sequence[Stretch]], Any] = (
        lambda state, trace, plain: state)  # on the host, with launches, and rounds without drafts
    start: Callable[[Any], Any] = lambda state: state  # on the device, when a launch begins
    hold: Callable[[Any, Load], Array | int] = (
        lambda state, load: 1)  # rounds for which a plan without drafts stands, unless a row ends
    adaptive: bool = False  # the state changes on the device, and holds tables of time


def make_spec(steps: int, branch: int, nodes: int, budget: int,
              mix: Sequence[float] = (1.0,)) -> SpecConfig:
    """A SpecConfig of constants; budget 0 is no limit, mix has a factor for each drafter."""
    unlimited = jnp.iinfo(jnp.int32).max
    return SpecConfig(steps=jnp.int32(steps), branch=jnp.int32(branch), nodes=jnp.int32(nodes),
                      budget=jnp.int32(budget or unlimited),
                      mix=jnp.asarray(mix, jnp.float32))


def off() -> Controller:
    """Plain decoding: every round is the bucket (B, 1)."""
    return Controller(init=lambda: (), plan=lambda state, load: make_spec(0, 1, 1, 0),
                      keep=keep_within, update=lambda state, launch: state,
                      hold=lambda state, load: FOREVER)


def fixed(min_survival: float = 0.0, spec: SpecConfig | None = None) -> Controller:
    """The state itself is the SpecConfig, so that a caller can change it between launches.

    Args:
      min_survival: nodes that are less likely on the accepted path are not verified.
      spec: the state at first; None drafts nothing.
    """
    planned = make_spec(0, 1, 1, 0) if spec is None else spec

    def keep(state: SpecConfig, load: Load, spec: SpecConfig, tree: DraftTree,
             buckets: tuple[Bucket, ...]) -> tuple[Array, Array]:
        likely = tree.live & (tree.survival >= min_survival)
        return keep_within(state, load, spec, tree.replace(live=likely), buckets)

    def depth(state: SpecConfig, steps: int | None) -> SpecConfig:
        return state.replace(steps=planned.steps if steps is None else jnp.int32(steps))

    return Controller(init=lambda: planned, plan=lambda state, load: state,
                      keep=keep, update=lambda state, launch: state, depth=depth,
                      hold=lambda state, load: FOREVER)


def keep_within(state: Any, load: Load, spec: SpecConfig, tree: DraftTree,
                buckets: tuple[Bucket, ...]) -> tuple[Array, Array]:
    """Keeps the likeliest nodes: at most `spec.nodes` a row and `spec.budget` in all.

    What the largest bucket does not hold is dropped too. Every live row's root is kept. Parents
    come before children because survival never grows along a path and the sorts are stable; so what
    is kept is closed under parent.
    """
    score = jnp.where(tree.live, tree.survival, -1.0)
    score = score.at[:, 0].set(jnp.where(tree.live[:, 0], jnp.inf, -1.0))
    nodes = jnp.clip(spec.nodes, 1, buckets[-1].nodes)
    live = tree.live & (place_in_row(score) < nodes)
    flat = jnp.where(live, score, -1.0).reshape(-1)
    order = jnp.argsort(-flat, stable=True)
    overall = jnp.zeros_like(order).at[order].set(jnp.arange(flat.shape[0]))
    budget = jnp.clip(spec.budget, live[:, 0].sum(), buckets[-1].packed)
    live &= overall.reshape(live.shape) < budget
    return live, smallest_bucket(live, buckets)


def place_in_row(score: Array) -> Array:
    """i32[B, N]: each entry's place when its row is sorted by falling score, ties by index."""
    index = jnp.arange(score.shape[1])
    earlier = (index[None, :] < index[:, None])[None]
    mine, other = score[:, :, None], score[:, None, :]
    return ((other > mine) | ((other == mine) & earlier)).sum(2)


def smallest_bucket(live: Array, buckets: tuple[Bucket, ...]) -> Array:
    """Index of the first bucket that holds all live nodes; buckets are sorted by size."""
    total, widest = live.sum(), live.sum(1).max()
    fits = jnp.stack([(total <= b.packed) & (widest <= b.nodes) for b in buckets])
    return jnp.argmax(fits).astype(jnp.int32)

