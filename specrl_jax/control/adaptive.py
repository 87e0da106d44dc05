"""What policies that look at time share: tables, what drafts gave, and an account of each launch.

A policy brings its own state and rules; `adaptive` makes a controller of it. The whole state is
equal on all data shards, because everything that enters it is reduced over them first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import ControlConfig
from specrl_jax.control import cost_model, prices
from specrl_jax.control.cost_model import Bucket, Ladders, Table
from specrl_jax.control.harvest import Harvest, count_nodes, follow, trust, unseen
from specrl_jax.control.lag import straggle
from specrl_jax.control.prices import Prices
from specrl_jax.control.protocol import Controller, Outcome, Stretch, keep_within, make_spec
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array, DraftTree, Load, SpecConfig

FREE = -1  # in Adaptive.force
HOLD = 32  # plain rounds for which a decision stands at most: its operations take 7 % of one
FOLLOW = 0.2  # share of a launch's surprise that the clock's correction takes up
SUMS = ("rounds", "rows", "context", "steps", "branch", "drafts", "drafting", "packed",
        "plain_seconds", "tokens", "expected", "switches")  # then seconds: each bucket's, drafts'


@struct.dataclass
class Adaptive:
    """The state of every policy here."""

    own: Any  # the policy's
    tables: dict[str, Table]  # by batch size, as the next rollout takes them
    prices: dict[str, Prices]  # by batch size, what rollouts have shown of the measured tables
    factor: Array  # f32[] seconds that launches take over those that prices let expect
    lag: dict[str, Array]  # by batch size, f32[] see lag.py
    force: Array  # i32[2] steps and bucket for measurements; FREE where the policy decides
    harvest: Harvest
    missed: Array  # f32[] tokens of a row since the drafter was asked, at least
    steps: Array  # i32[] of the last round
    sums: Array  # f32[SUMS + buckets + 1] of this launch, or of the last; see SUMS
    by_depth: Array  # f32[2, D+1] of it: seconds and tokens, had all rounds drafted to that depth


class Bounds(NamedTuple):
    """What is static."""

    depth: int  # D
    branch: int  # K
    nodes: int  # N
    mix: tuple[float, ...]
    ladders: Ladders
    longest: int  # context


class Policy(NamedTuple):
    """What one policy decides. `begin` is for a rollout; `note` sees the state before the round;
    `launch` is what `explain` says of it, with its `batch` and `seconds`."""

    init: Callable[[], Any]
    plan: Callable[[Adaptive, Table, Load], tuple[Array, Array, Array]]  # steps, branch, nodes
    keep: Callable[[Adaptive, Table, Load, SpecConfig, DraftTree, tuple[Bucket, ...]],
                   tuple[Array, Array]]
    hold: Callable[[Adaptive, Table, Load], Array] = (
        lambda state, table, load: jnp.int32(HOLD))  # rounds for which a plan without drafts stands
    begin: Callable[[Any], Any] = lambda own: own
    note: Callable[[Adaptive, Outcome], Any] = lambda state, outcome: state.own
    update: Callable[[Any, dict[str, Any]], Any] = lambda own, launch: own
    tries: bool = False  # whether rollouts correct its prices, and some try what may be cheaper


def table_of(state: Adaptive, load: Load) -> Table:
    return state.tables[str(load.live.shape[0])]


def context_of(load: Load) -> Array:
    """f32[] the longest context of any live row: attention reads as far for all."""
    longest = jnp.where(load.live, load.length, 0).max()
    return jax.lax.pmax(longest, ROWS).astype(jnp.float32)


def rows_of(load: Load) -> Array:
    """f32[] live rows of a shard, on average."""
    return jax.lax.pmean(load.live.sum().astype(jnp.float32), ROWS)


def average(load: Load, of_rows: Array) -> Array:
    """f32[] of a live row."""
    found, rows = jax.lax.psum(
        (jnp.where(load.live, of_rows, 0).astype(jnp.float32).sum(), load.live.sum()), ROWS)
    return found / jnp.maximum(rows, 1)


def adaptive(policy: Policy, control: ControlConfig, bounds: Bounds) -> Controller:
    """The controller of a policy."""

    def init() -> Adaptive:
        return blank(policy.init(), bounds)

    def plan(state: Adaptive, load: Load) -> SpecConfig:
        steps, branch, nodes = policy.plan(state, table_of(state, load), load)
        free = state.force[0] == FREE
        spec = make_spec(0, 1, 1, 0, bounds.mix)
        return spec.replace(
            steps=jnp.where(free, steps, state.force[0]).astype(jnp.int32),
            branch=jnp.where(free, branch, bounds.branch).astype(jnp.int32),
            nodes=jnp.where(free, nodes, bounds.nodes).astype(jnp.int32))

    def hold(state: Adaptive, load: Load) -> Array:
        return jnp.where(state.force[0] == FREE,
                         policy.hold(state, table_of(state, load), load), HOLD)

    def keep(state: Adaptive, load: Load, spec: SpecConfig, tree: DraftTree,
             buckets: tuple[Bucket, ...]) -> tuple[Array, Array]:
        return jax.lax.cond(
            state.force[0] == FREE,
            lambda: policy.keep(state, table_of(state, load), load, spec, tree, buckets),
            lambda: _forced(state, load, spec, tree, buckets))

    def note(state: Adaptive, outcome: Outcome) -> Adaptive:
        return account(state, outcome).replace(own=policy.note(state, outcome))

    def update(state: Adaptive, launch: dict[str, Any]) -> Adaptive:
        factor, seconds = clock(state, launch, control.clock == "frozen")
        return state.replace(factor=factor,
                             own=policy.update(state.own, launch | {"seconds": seconds}))

    def begin(state: Adaptive, prompt: int) -> Adaptive:
        """A drafter has read no prompt when a rollout begins."""
        return state.replace(own=policy.begin(state.own), missed=np.float32(prompt),
                             steps=np.int32(FREE))

    def start(state: Adaptive) -> Adaptive:
        return state.replace(sums=jnp.zeros_like(state.sums),
                             by_depth=jnp.zeros_like(state.by_depth))

    def end(state: Adaptive, trace: Sequence[Mapping[str, Any]], plain: Sequence[Stretch]
            ) -> Adaptive:
        state = state.replace(lag=straggle(state.lag, believed(state), trace, plain))
        learns = policy.tries and control.clock != "frozen" and state.force[0] == FREE
        return learned(state, trace) if learns else state

    def depth(state: Adaptive, steps: int | None) -> Adaptive:
        return state.replace(force=np.asarray([FREE if steps is None else steps, FREE], np.int32))

    return Controller(init=init, plan=plan, keep=keep, update=update, note=note, explain=explain,
                      weigh=lambda state, batch, left: weigh(state, control.length_weight, left),
                      weighs=control.length_weight > 0,
                      depth=depth, begin=begin, end=end, start=start, hold=hold, adaptive=True)


def blank(own: Any, bounds: Bounds) -> Adaptive:
    """The state before anything is known, as host arrays."""
    return Adaptive(
        own=own, tables=cost_model.blank(bounds.ladders, bounds.longest, bounds.depth),
        prices={str(rows): prices.blank(len(buckets)) for rows, buckets in bounds.ladders.items()},
        factor=np.float32(1),
        lag={str(rows): np.float32(1) for rows in bounds.ladders},
        force=np.full(2, FREE, np.int32),
        harvest=unseen(max(bounds.depth, 1)), missed=np.float32(0), steps=np.int32(FREE),
        sums=np.zeros(len(SUMS) + 1 + max(map(len, bounds.ladders.values()), default=0),
                      np.float32),
        by_depth=np.zeros((2, bounds.depth + 1), np.float32))


def _forced(state: Adaptive, load: Load, spec: SpecConfig, tree: DraftTree,
            buckets: tuple[Bucket, ...]) -> tuple[Array, Array]:
    """All that was drafted; where a bucket is forced, roots alone in that bucket."""
    roots = jnp.arange(tree.live.shape[1])[None] == 0
    free = state.force[1] == FREE
    live, bucket = keep_within(state, load, spec, tree.replace(live=tree.live & (roots | free)),
                               buckets)
    return live, jnp.where(free, bucket, state.force[1])


# Accounting, on the device.


def account(state: Adaptive, outcome: Outcome) -> Adaptive:
    """Adds rounds to what drafts gave and to the launch's sums."""
    load, table, rounds = outcome.load, table_of(state, outcome.load), outcome.rounds
    depth = state.by_depth.shape[1] - 1
    steps = jnp.clip(outcome.spec.steps, 0, depth if table.packed.shape[0] > 1 else 0)
    later = (rounds - 1) / 2  # tokens of context more than at first, on average
    verify, draft = cost_model.at(table, context_of(load) + later)
    drafting = (steps > 0).astype(jnp.float32)
    verifying = rounds * verify[outcome.bucket]
    asking = rounds * (draft[steps] + drafting * state.missed * table.catch_up)
    seconds = [jnp.where(outcome.bucket == i, verifying, 0.0)
               for i in range(state.sums.shape[0] - len(SUMS) - 1)]
    ones = load.live.astype(jnp.float32)
    drafts = outcome.live & (jnp.arange(outcome.live.shape[1])[None] > 0)
    promised = jnp.where(drafts, outcome.tree.survival, 0).sum()
    found = count_nodes(outcome.tree, load.live, state.harvest.count.shape[0])
    rows, tokens, drafts, promised, context, found = jax.lax.psum(
        (ones.sum(), outcome.count.sum().astype(jnp.float32), drafts.sum().astype(jnp.float32),
         promised, (ones * (load.length + later)).sum(), found), ROWS)
    believed = trust(state.harvest)
    by_depth = rounds * _by_depth(state.harvest, table, verify, draft, rows_of(load), rows)
    harvest = follow(state.harvest, found, rows, steps, promised, tokens - rounds * rows,
                     rounds)
    add = dict(rounds=rounds, rows=rounds * rows, context=rounds * context, steps=rounds * steps,
               branch=rounds * drafting * outcome.spec.branch, drafts=rounds * drafts,
               drafting=rounds * drafting, packed=rounds * table.packed[outcome.bucket],
               plain_seconds=rounds * verify[0], tokens=tokens,
               expected=rounds * (rows + promised * believed),
               switches=((state.steps > 0) != (steps > 0)) & (state.steps != FREE))
    return state.replace(
        harvest=harvest, missed=jnp.where(steps > 0, 0.0, state.missed + rounds), steps=steps,
        sums=state.sums + _listed([*(add[name] for name in SUMS), *seconds, asking]),
        by_depth=state.by_depth + by_depth)


def _listed(scalars: Sequence[Array]) -> Array:
    """f32[len(scalars)], as one operation on a CPU, where those that are stacked are one each."""
    index = jnp.arange(len(scalars))
    return sum(jnp.where(index == i, jnp.asarray(a, jnp.float32), 0.0)
               for i, a in enumerate(scalars))


def _by_depth(harvest: Harvest, table: Table, verify: Array, draft: Array, shard_rows: Array,
              rows: Array) -> Array:
    """f32[2, D+1] seconds and tokens of this round at every fixed depth, by the tables.

    What was never drafted is not counted on.
    """
    known = harvest.seen > 0
    nodes, gain = (jnp.concatenate([jnp.zeros(1), jnp.cumsum(a)])[: draft.shape[0]]
                   for a in (harvest.count.sum(1), jnp.where(known, harvest.mass.sum(1), 0)))
    room = jnp.maximum(table.packed[-1] / jnp.maximum(shard_rows, 1) - 1, 0.0)
    share = jnp.where(nodes > room, room / jnp.maximum(nodes, 1e-6), 1.0)
    each = 1 + share * nodes
    bucket = cost_model.bucket_for(table, jnp.ceil(shard_rows * each - 1e-3), jnp.ceil(each - 1e-3))
    tokens = rows * (1 + trust(harvest) * share * gain)
    drafts = jnp.where(jnp.arange(draft.shape[0]) > 0, draft, 0.0)
    return jnp.stack([verify[bucket] + drafts, tokens])


# Between launches, on the host.


def clock(state: Adaptive, launch: dict[str, Any], frozen: bool) -> tuple[np.ndarray, float]:
    """The corrected factor, and the seconds that an explained launch took for a policy."""
    predicted = launch["predicted_seconds"]
    if frozen or predicted <= 0:
        return state.factor, max(predicted, 1e-9)
    surprise = min(max(launch["seconds"] / predicted, 0.2), 5.0)
    return np.float32(_value(state.factor) * surprise**FOLLOW), launch["seconds"]


def _value(scalar: Any) -> float:
    """`scalar` on the host; `float` of an array of JAX takes 100 times as long."""
    return np.asarray(scalar).item()


def _told(state: Adaptive, size: str) -> tuple[dict[str, float], list[float]]:
    """The launch's sums by name, and seconds in each bucket and for drafts, as now believed."""
    sums = np.asarray(state.sums).tolist()
    worth = prices.doubted(state.prices[size])
    spent = [*sums[len(SUMS):len(SUMS) + len(worth) - 1], sums[-1]]
    named = dict(zip(SUMS, sums, strict=False))
    named["plain_seconds"] *= worth[0]
    return named, [a * b for a, b in zip(spent, worth, strict=True)]


def explain(state: Adaptive, launch: dict[str, Any]) -> dict[str, Any]:
    """What was chosen in the last launch, what that was to take and give, and what else would have.

    `off_seconds` and `fixed_seconds` are what the launch's own tokens were to take without a draft
    and at the best constant depth, `fixed_steps`; predicted, by the corrected tables and `lag`. A
    `trial` took little known prices for lower than they are believed to be, and `fixed_seconds` is
    by these. `spent` are the seconds foreseen in each bucket and for drafts.
    """
    factor, size = _value(state.factor), str(launch["batch"])
    s, spent = _told(state, size)
    seconds = sum(spent)
    rounds, rows = max(s["rounds"], 1.0), max(s["rows"], 1.0)
    overhead = _value(state.tables[size].launch)
    takes, gives = state.by_depth.tolist()
    takes[0] = s["plain_seconds"]
    rate = [gave / max(took, 1e-12) for took, gave in zip(takes, gives, strict=True)]
    lag, drafting = _value(state.lag[size]), s["drafting"] / rounds
    rate[0] *= 1 + drafting * (lag - 1)
    rate[1:] = [r / (1 + (1 - drafting) * (lag - 1)) for r in rate[1:]]
    best = rate.index(max(rate))
    took = [float(factor * (s["tokens"] / max(r, 1e-12) + overhead)) for r in (rate[0], rate[best])]
    return {
        "live": s["rows"] / rounds, "context": s["context"] / rows, "steps": s["steps"] / rounds,
        "branch": s["branch"] / max(s["drafting"], 1.0), "nodes": 1 + s["drafts"] / rows,
        "drafting": s["drafting"] / rounds, "launch_rounds": s["rounds"],
        "width": s["packed"] / rounds, "switches": s["switches"], "tokens": s["tokens"],
        "predicted_tokens": s["expected"],
        "predicted_seconds": factor * (seconds + overhead),
        "spent_seconds": factor * (seconds - s["plain_seconds"]),
        "off_seconds": took[0], "fixed_seconds": took[1], "fixed_steps": best, "lag": lag,
        "trial": float(prices.trial(state.prices[size])), "spent": spent}


def believed(state: Adaptive) -> dict[str, Table]:
    """The tables with what `verify` is believed to take, where a trial takes it for lower."""
    return {size: table if not prices.trial(known := state.prices[size]) else table.replace(
        verify=np.asarray(table.verify) * prices.doubted(known)[:-1, None])
        for size, table in state.tables.items()}


def learned(state: Adaptive, trace: Sequence[Mapping[str, Any]]) -> Adaptive:
    """The state with prices that a rollout's launches have corrected."""
    known, tables = dict(state.prices), dict(state.tables)
    for size in dict.fromkeys(str(launch["batch"]) for launch in trace):
        launches = [launch for launch in trace if str(launch["batch"]) == size]
        spent = [sum(of) for of in zip(*(launch["spent"] for launch in launches), strict=True)]
        known[size], tables[size] = prices.learn(
            known[size], tables[size], spent, len(launches) * _value(tables[size].launch),
            sum(launch["seconds"] for launch in launches))
    return state.replace(prices=known, tables=tables)


def weigh(state: Adaptive, strength: float, left: np.ndarray) -> np.ndarray:
    """Weights of rows, 1 on average, from the tokens that each still has to come.

    A token of the row that stays longest shortens the rollout by a round of one row; a token of the
    k-th longest saves what a round of k rows takes more than one of k - 1. Where small batches take
    nearly as long as large ones, long rows are what counts.

    Args:
      strength: 0 weighs all alike, 1 wholly by what is saved.
      left: f32[rows], of live rows.
    """
    if not strength or len(left) == 0:
        return np.ones_like(left)
    plain = {int(rows): float(np.asarray(table.verify)[0, 0])
             for rows, table in believed(state).items()}
    if not plain or max(plain.values()) <= 0:
        return np.ones_like(left)
    sizes = sorted(plain)
    seconds = np.interp(np.arange(len(left) + 1), [0, *sizes], [0.0, *(plain[s] for s in sizes)])
    seconds[1:] = np.maximum.accumulate(seconds[1:])
    saved = np.diff(seconds)
    longest_first = np.argsort(-left, kind="stable")
    weight = np.empty(len(left))
    weight[longest_first] = saved / max(saved.mean(), 1e-12)
    _, alike = np.unique(left, return_inverse=True)  # which of equal rows ends last is not known
    weight = (np.bincount(alike, weight) / np.bincount(alike))[alike]
    return (1 - strength + strength * weight).astype(np.float32)
