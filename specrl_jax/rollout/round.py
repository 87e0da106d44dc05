"""One round (plan, draft, keep, verify, commit, observe) for one data shard.

Everything here runs inside `shard_map` over the data axes: arrays are a shard's own, and what
selects a branch or ends a loop is reduced over all shards first, so all shards decide alike.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.config import DRAWN_RULES, MOST_MIX, check
from specrl_jax.control import acceptance
from specrl_jax.control.buckets import Bucket, bucket_table
from specrl_jax.control.protocol import FOREVER, Controller, Outcome, Plan, keep_within
from specrl_jax.draft.protocol import Drafter
from specrl_jax.draft.tree import compact, roots
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.transformer import Packing, Params
from specrl_jax.sharding import ROWS
from specrl_jax.structs import (
    Array,
    Cache,
    Counters,
    DraftTree,
    Frontier,
    Load,
    Path,
    RolloutState,
    Sampling,
    SpecConfig,
    Verdict,
)
from specrl_jax.verify import commit, match, rejection, sampling
from specrl_jax.verify.registry import RULES

FREE = -1  # in `force`: the controller decides


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What is static in a launch: the program is a function of this and of shapes."""

    arch: Architecture
    drafter: Drafter
    controller: Controller
    max_packed: int = 64  # tokens that one verification may pack
    min_batch: int = 0  # smallest batch size, whose empty slots verify drafts; see bucket_table
    implementation: str | None = None  # of tree attention
    rule: str = "match"  # of verification, one of config.RULES
    invariant: bool = False  # see model/invariant.py
    truncates: bool = False  # whether a row may ask for top-k or top-p


def frontier_of(state: RolloutState) -> Frontier:
    """Where the rows stand; an empty slot holds the sequence index Q."""
    held = state.seq < state.sequences.done.shape[0]
    done = state.sequences.done.at[state.seq].get(mode="fill", fill_value=True)
    generated = state.sequences.length.at[state.seq].get(mode="fill", fill_value=0)
    return Frontier(root=state.root, seq=state.seq, generated=generated, context=state.cache.length,
               live=held & ~done)


def sampling_of(state: RolloutState) -> Sampling:
    """The sampling of the sequences that the rows hold; of an empty slot, that of some sequence."""
    stop = state.sampling.stop
    rows = jax.tree.map(lambda a: a.at[state.seq].get(mode="clip"), state.sampling.replace(stop=()))
    return rows.replace(stop=stop)


def load_of(state: RolloutState, frontier: Frontier, rows: Sampling, waiting: Array) -> Load:
    """Returns what the controller sees. No row is expected to end at once, or beyond its limit."""
    expected = state.expected.at[state.seq].get(mode="fill", fill_value=1)
    left = (jnp.minimum(expected, rows.limit) - frontier.generated).astype(jnp.float32)
    return Load(live=frontier.live, length=frontier.context, expected_left=jnp.maximum(left, 1),
                room=rows.limit - frontier.generated, waiting=waiting)


@struct.dataclass
class RoundPlan:
    """A round that is about to run, or the first of several plain ones.

    Without drafts it is a plain round. With drafts it is one too if nothing of the tree is kept:
    `bucket` is 0 then.
    """

    frontier: Frontier
    rows: Sampling
    load: Load
    plan: Plan
    clamped: Array  # bool[] whether the controller planned more than the shapes hold
    drafts: Array  # bool[] whether a tree is proposed first
    tree: DraftTree  # without a live node until then
    live: Array  # bool[B, N] its nodes to verify
    bucket: Array  # i32[] the same on all shards


def buckets_of(decoder: Decoder, batch: int) -> tuple[Bucket, ...]:
    """Returns the buckets of a batch size of a shard, smallest first."""
    return bucket_table(batch, decoder.drafter.nodes, decoder.max_packed,
                        batch == decoder.min_batch)


def plan_round(decoder: Decoder, state: RolloutState, tree: DraftTree, waiting: Array,
               force: Array) -> RoundPlan:
    """Returns the plan of the next round.

    Args:
      tree: any tree of the right shapes; its values are not read.
      waiting: i32[] sequences of this shard without a slot.
      force: i32[2] depth and bucket to use whatever the controller plans; FREE leaves them to it.
    """
    frontier, rows = frontier_of(state), sampling_of(state)
    load = load_of(state, frontier, rows, waiting)
    plan = decoder.controller.plan(state.control, load)
    spec, clamped = clamp(plan.spec, decoder.drafter, frontier.live.sum())
    room = len(buckets_of(decoder, frontier.root.shape[0])) > 1  # for more than roots
    free = force[0] == FREE
    steps = jnp.where(free, spec.steps, jnp.minimum(force[0], decoder.drafter.depth))
    spec = spec.replace(steps=steps if room else jnp.zeros_like(steps))
    measures = force[1] != FREE  # whole trees
    spec = spec.replace(branch=jnp.where(measures, decoder.drafter.branch, spec.branch),
                        nodes=jnp.where(measures, decoder.drafter.nodes, spec.nodes))
    plan = plan.replace(spec=spec, valid_for=jnp.maximum(
        jnp.where(free, plan.valid_for, FOREVER), 1))
    nothing = jnp.zeros_like(tree.live)
    return RoundPlan(frontier=frontier, rows=rows, load=load, plan=plan, clamped=clamped,
                     drafts=spec.steps > 0, tree=tree.replace(live=nothing), live=nothing,
                     bucket=jnp.int32(0))


def blank_plan(decoder: Decoder, drafter_params: Params, state: RolloutState, waiting: Array,
               force: Array) -> RoundPlan:
    """Returns zeros in the shapes of a RoundPlan with a proposed tree."""

    def proposed() -> RoundPlan:
        frontier, rows = frontier_of(state), sampling_of(state)
        load = load_of(state, frontier, rows, waiting)
        spec = decoder.controller.plan(state.control, load).spec
        tree, _ = decoder.drafter.propose(drafter_params, state.draft, frontier, rows, spec,
                                          functools.partial(acceptance.survive, state.estimate))
        return plan_round(decoder, state, tree, waiting, force)

    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(proposed))


def draft(decoder: Decoder, drafter_params: Params, state: RolloutState, planned: RoundPlan
          ) -> tuple[RolloutState, DraftTree]:
    """Proposes a tree for the live rows."""
    frontier, spec = planned.frontier, planned.plan.spec
    tree, drafter_state = decoder.drafter.propose(
        drafter_params, state.draft, frontier, planned.rows, spec,
        functools.partial(acceptance.survive, state.estimate))
    broken = (frontier.live & jnp.isnan(tree.logq[:, 0])).sum(dtype=jnp.int32)
    counters = state.counters
    counters = counters.replace(broken=counters.broken + broken,
                                draft_rounds=counters.draft_rounds + 1,
                                draft_steps=counters.draft_steps + spec.steps)
    room = planned.load.room[:, None]  # a round's last token needs no draft
    tree = tree.replace(live=tree.live & (tree.depth < room))
    return state.replace(draft=drafter_state, counters=counters), tree


def keep(decoder: Decoder, state: RolloutState, planned: RoundPlan, tree: DraftTree, force: Array
         ) -> RoundPlan:
    """Chooses which nodes of a tree are verified, and in which bucket.

    A forced depth verifies all that was drafted, a forced bucket only the roots.
    """
    buckets, plan = buckets_of(decoder, tree.live.shape[0]), planned.plan
    shown = _shown(decoder, tree)

    def forced() -> tuple[Array, Array]:
        roots_only = jnp.arange(tree.live.shape[1])[None] == 0
        free = force[1] == FREE
        live, bucket = keep_within(plan.spec, tree.replace(live=tree.live & (roots_only | free)),
                                   buckets)
        return live, jnp.where(free, bucket, force[1])

    live, bucket = jax.lax.cond(
        force[0] == FREE, lambda: decoder.controller.keep(state.control, plan, planned.load, shown,
                                                          buckets), forced)
    return planned.replace(tree=tree, live=live, bucket=jax.lax.pmax(bucket, ROWS))


def _shown(decoder: Decoder, tree: DraftTree) -> DraftTree:
    """Returns what a controller may see of a tree.

    Where drafts are tested as drawn, that is nothing that was drawn: a node that is verified
    because of its token has another law (non-anticipation, DSpark).
    """
    if decoder.rule not in DRAWN_RULES:
        return tree
    return tree.replace(tokens=jnp.zeros_like(tree.tokens), logq=jnp.zeros_like(tree.logq),
                        gap=jnp.zeros_like(tree.gap), proposal=None)


def plain_round(decoder: Decoder, params: Params, drafter_params: Params, state: RolloutState,
                planned: RoundPlan) -> RolloutState:
    """Commits one token of every live row, by the same operations with a drafter and without."""
    bucket = Bucket(planned.frontier.root.shape[0], 1)
    tree = roots(planned.frontier.root, planned.frontier.live, 1)
    verdict, path = verify_in(decoder, params, drafter_params, state.cache, planned, tree,
                              tree.live, bucket, 0)
    return commit_round(decoder, drafter_params, state, planned, jnp.int32(bucket.packed), verdict,
                        path)


def drafted_round(decoder: Decoder, params: Params, drafter_params: Params, state: RolloutState,
                  planned: RoundPlan) -> tuple[RolloutState, Array]:
    """Verifies a tree of more than roots and commits the accepted path.

    Returns:
      The state, and the committed tokens i32[B].
    """
    buckets = buckets_of(decoder, planned.frontier.root.shape[0])[1:]
    branches = [functools.partial(verify_in, decoder, params, drafter_params, state.cache, planned,
                                  bucket=b, depth=decoder.drafter.depth) for b in buckets]
    verdict, path = jax.lax.switch(planned.bucket - 1, branches, planned.tree, planned.live)
    packed = jnp.asarray([b.packed for b in buckets], jnp.int32)[planned.bucket - 1]
    seen = acceptance.observe(state.seen, planned.tree, path, verdict, planned.frontier)
    state = commit_round(decoder, drafter_params, state.replace(seen=seen), planned, packed,
                         verdict, path)
    return state, verdict.count


def commit_round(decoder: Decoder, drafter_params: Params, state: RolloutState, planned: RoundPlan,
                 packed: Array, verdict: Verdict, path: Path) -> RolloutState:
    """Commits a verdict to the cache and the sequences, and shows it to the drafter."""
    frontier = planned.frontier
    last = jnp.take_along_axis(verdict.tokens, jnp.maximum(verdict.count - 1, 0)[:, None], 1)
    return state.replace(
        cache=commit.append(state.cache, path, verdict.count),
        root=jnp.where(verdict.count > 0, last[:, 0], state.root),
        sequences=commit.record(state.sequences, verdict, frontier),
        draft=decoder.drafter.observe(drafter_params, state.draft, frontier, verdict, path),
        counters=count(state.counters, planned, verdict, packed))


def observe(decoder: Decoder, state: RolloutState, planned: RoundPlan, count: Array, rounds: Array
            ) -> RolloutState:
    """Shows the controller the `rounds` i32[] that ran by a plan and the tokens they committed.

    Args:
      count: i32[B].
    """
    outcome = Outcome(planned.load, _shown(decoder, planned.tree), planned.live, planned.bucket,
                      count, rounds)
    return state.replace(control=decoder.controller.observe(state.control, planned.plan, outcome))


def clamp(spec: SpecConfig, drafter: Drafter, rows: Array) -> tuple[SpecConfig, Array]:
    """Returns a plan cut to what the shapes hold, and whether anything was cut, bool[].

    0 <= steps <= D, 1 <= branch <= K, 1 <= nodes <= N, factors of drafters in [0, MOST_MIX], so
    that no draft counts as much as a root, and a budget that holds the root of each of `rows`.
    """
    inside = spec.replace(
        steps=jnp.clip(spec.steps, 0, drafter.depth),
        branch=jnp.clip(spec.branch, 1, drafter.branch),
        nodes=jnp.clip(spec.nodes, 1, drafter.nodes), budget=jnp.maximum(spec.budget, rows),
        mix=jnp.where(spec.mix >= 0, jnp.minimum(spec.mix, MOST_MIX), 0))  # 0 if not a number, too
    changed = jax.tree.map(lambda a, b: (a != b).any(), spec, inside)
    return inside, jnp.stack(jax.tree.leaves(changed)).any()


def count(counters: Counters, planned: RoundPlan, verdict: Verdict, packed: Array) -> Counters:
    """Adds one round to the counters."""
    frontier, tree = planned.frontier, planned.tree
    rows, index = frontier.live.sum(), jnp.arange(verdict.path.shape[1])[None]

    def by_origin(which: Array, origin: Array) -> Array:
        drafters = jnp.arange(counters.drafted.shape[1])
        return (which[..., None] & (origin[..., None] == drafters[None, None])).sum((0, 1))[None]

    drafted = by_origin(planned.live.at[:, 0].set(False), tree.origin)
    accepted = by_origin((index > 0) & (index < verdict.count[:, None]),
                         jnp.take_along_axis(tree.origin, verdict.path, 1))
    return counters.replace(
        rounds=counters.rounds + 1, row_rounds=counters.row_rounds + rows,
        committed=counters.committed + verdict.count.sum(),
        accepted=counters.accepted + accepted, drafted=counters.drafted + drafted,
        packed=counters.packed + packed, slots=counters.slots + frontier.live.shape[0],
        clamped=counters.clamped + planned.clamped)


def pack(live: Array, parent: Array, packed: int) -> Packing:
    """The packing of a bucket's trees. Where every place fits, nodes simply stay in order.

    Args:
      live: bool[B, n].
      parent: i32[B, n].
      packed: W, at least the live nodes.
    """
    batch, nodes = live.shape
    if packed == batch * nodes:
        index = jnp.arange(packed, dtype=jnp.int32)
        place = index.reshape(batch, nodes)
    else:
        flat = live.reshape(-1)
        index = jnp.nonzero(flat, size=packed, fill_value=0)[0].astype(jnp.int32)
        place = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, 0).reshape(live.shape)
    return Packing(row=index // nodes, node=index % nodes, place=place, parent=parent)


def verify_in(decoder: Decoder, params: Params, drafter_params: Params, cache: Cache,
              planned: RoundPlan, tree: DraftTree, live: Array, bucket: Bucket, depth: int
              ) -> tuple[Verdict, Path]:
    """One bucket's verification: pack, forward, draw, walk, gather.

    Args:
      depth: D; results have D + 1 places a row, whatever the bucket.
    """
    frontier, rows = planned.frontier, planned.rows
    tokens, parent, level, kept, order = compact(tree, live, bucket.nodes)
    packing = pack(kept, parent, bucket.packed)
    at = (packing.row, packing.node)
    hidden, fresh, taps = transformer.tree_forward(
        decoder.arch, params, cache, tokens[at], frontier.context[packing.row] + level[at],
        packing, decoder.implementation, decoder.drafter.taps)
    logits = transformer.logits(decoder.arch, params, hidden, decode=True)
    truncation = (rows.top_k, rows.top_p) if decoder.truncates else (None, None)
    processing = jax.tree.map(lambda a: a[packing.row], (rows.temperature, *truncation))
    if decoder.rule == "match":
        drawn = sampling.draw(logits, *processing, rows.key[packing.row],
                              frontier.generated[packing.row] + level[at])
        verdict = match.judge(tokens, parent, kept, drawn, packing.place, frontier, rows, depth)
        draws = drawn.token[packing.place]
    else:
        rank = jnp.take_along_axis(tree.rank, order, 1)
        verdict, draws = _reject(decoder, RULES[decoder.rule].process(logits, *processing),
                                 (tokens, parent, rank, kept), _drawn(decoder, tree, order),
                                 packing.place, frontier, rows, depth)
    along = jnp.take_along_axis(packing.place, verdict.path, 1)
    if taps is not None:
        taps = jnp.moveaxis(decoder.drafter.project(drafter_params, taps, decode=True), 0, -1)[
            along
        ]
    original = jnp.take_along_axis(order, verdict.path, 1)
    rows_of = jnp.arange(live.shape[0])[:, None]
    draws = jnp.zeros(live.shape, jnp.int32).at[rows_of, order].set(draws)
    return verdict.replace(path=original), Path(kv=_along(fresh, along), taps=taps, draw=draws,
                                               verified=live)


def _drawn(decoder: Decoder, tree: DraftTree, order: Array) -> Array:
    """f32[B, n, V] log-probabilities that the nodes' successors were drawn from; -inf: none known.

    Raises:
      ConfigError: the rule asks for them and the drafter does not tell.
    """
    batch, nodes = order.shape
    none = jnp.full((batch, nodes, decoder.arch.vocab_size), -jnp.inf)
    if not RULES[decoder.rule].drawn or nodes == 1:
        return none
    check(tree.proposal is not None, "spec.rule", decoder.rule,
          "the drafter does not tell what it drew from; choose rejection")
    logq = jnp.take_along_axis(tree.proposal.logq, order[..., None], 1)
    return none.at[..., tree.proposal.vocab].set(logq)


def _reject(decoder: Decoder, target: sampling.Processed, tree: tuple[Array, ...], logq: Array,
            place: Array, frontier: Frontier, rows: Sampling, depth: int) -> tuple[Verdict, Array]:
    """The verdict of another rule than match, and the tokens i32[B, n] emitted at walked nodes."""
    batch, nodes = tree[0].shape
    verdict = rejection.judge(*tree, target, logq, place, frontier, rows, depth,
                              RULES[decoder.rule].walk)
    walked = jnp.where(jnp.arange(verdict.path.shape[1])[None] < verdict.count[:, None],
                       verdict.path, nodes)  # the path's last node repeats: keep its first token
    emitted = jnp.zeros((batch, nodes), jnp.int32).at[
        jnp.arange(batch)[:, None], walked].set(verdict.tokens, mode="drop")
    return verdict, emitted


def _along(fresh: list[tuple[Array, Array]], place: Array) -> Array:
    """The path's keys and values, f[D+1, L, 2, G, E, B], of all layers' new ones, each [G, E, W].

    One array, and in plain decoding one operation: some for each layer would cost it 2 % on a CPU.

    Args:
      place: i32[B, D+1] of the path in W.
    """
    batch, width = place.shape
    both = jnp.concatenate([a[None] for kv in fresh for a in kv])
    shape = (width, len(fresh), 2, *both.shape[1:-1], batch)
    if width == 1:  # roots alone, in order
        return both.reshape(shape)
    return jnp.moveaxis(both[..., place.T], -2, 0).reshape(shape)
