"""One round (plan, draft, keep, verify, commit) for one data shard.

Everything here runs inside `shard_map` over the data axes: arrays are a shard's own, and what
selects a branch or ends a loop is reduced over all shards first, so that all take it alike.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.config import MOST_MIX, ConfigError
from specrl_jax.control import acceptance
from specrl_jax.control.cost_model import Bucket, bucket_ladder
from specrl_jax.control.protocol import Controller, Outcome
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
    Proposal,
    RolloutState,
    Sampling,
    SpecConfig,
    Verdict,
)
from specrl_jax.verify import commit
from specrl_jax.verify.protocol import Nodes, Rule, Target
from specrl_jax.verify.registry import RULES


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What is static in a launch: the program is a function of this and of shapes."""

    arch: Architecture
    drafter: Drafter
    controller: Controller
    most: int = 64  # tokens that one verification may pack
    least: int = 0  # batch size that is not made smaller as rows end; see bucket_ladder
    implementation: str | None = None  # of tree attention
    rule: str = "match"  # of verification, see verify/registry.py
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


def load_of(state: RolloutState, frontier: Frontier, rows: Sampling) -> Load:
    """What the controller sees. No row is expected to end at once, or beyond its limit."""
    expected, weight = (a.at[state.seq].get(mode="fill", fill_value=1)
                        for a in (state.expected, state.weight))
    left = (jnp.minimum(expected, rows.limit) - frontier.generated).astype(jnp.float32)
    return Load(live=frontier.live, length=frontier.context, expected_left=jnp.maximum(left, 1),
                room=rows.limit - frontier.generated, weight=weight)


@struct.dataclass
class Turn:
    """A round that is about to run, or the first of several plain ones.

    It is a plain one where `bucket` is 0 once nothing is asked.
    """

    frontier: Frontier
    rows: Sampling
    load: Load
    spec: SpecConfig
    hold: Array  # i32[] rounds for which it stands, unless a row ends
    clamped: Array  # bool[] whether the controller planned more than the shapes hold
    asks: Array  # bool[] whether a tree is to be proposed first
    tree: DraftTree  # without a live node until then
    live: Array  # bool[B, N] of them to verify
    bucket: Array  # i32[] the same on all shards


def buckets_of(decoder: Decoder, batch: int) -> tuple[Bucket, ...]:
    return bucket_ladder(batch, decoder.drafter.nodes, decoder.most, batch == decoder.least)


def turn_of(decoder: Decoder, state: RolloutState, tree: DraftTree) -> Turn:
    """The next round. `tree` is any, whose nodes are not looked at."""
    frontier, rows = frontier_of(state), sampling_of(state)
    load = load_of(state, frontier, rows)
    spec, clamped = clamp(decoder.controller.plan(state.control, load), decoder.drafter,
                          frontier.live.sum())
    room = len(buckets_of(decoder, frontier.root.shape[0])) > 1  # for more than roots
    asks = room & (spec.steps > 0)
    hold = jnp.where(spec.steps == 0, jnp.maximum(decoder.controller.hold(state.control, load), 1),
                     1)
    none = jnp.zeros_like(tree.live)
    return Turn(
        frontier=frontier,
        rows=rows,
        load=load,
        spec=spec,
        hold=hold,
        clamped=clamped,
        asks=asks,
        tree=tree.replace(live=none),
        live=none,
        bucket=jnp.int32(0),
    )


def blank_turn(decoder: Decoder, drafter_params: Params, state: RolloutState) -> Turn:
    """Zeros, of the shapes that a turn has whose tree the drafter has proposed."""

    def proposed() -> Turn:
        frontier, rows = frontier_of(state), sampling_of(state)
        spec = decoder.controller.plan(state.control, load_of(state, frontier, rows))
        tree, _ = decoder.drafter.propose(drafter_params, state.draft, frontier, rows, spec,
                                          functools.partial(acceptance.survive, state.estimate))
        return turn_of(decoder, state, tree)

    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(proposed))


def propose(decoder: Decoder, drafter_params: Params, state: RolloutState, turn: Turn
            ) -> tuple[RolloutState, Turn]:
    """Drafts a tree, and chooses what of it is verified, and in which bucket."""
    tree, draft = decoder.drafter.propose(drafter_params, state.draft, turn.frontier, turn.rows,
                                          turn.spec, functools.partial(acceptance.survive,
                                                                       state.estimate))
    room = turn.load.room[:, None]  # a round's last token needs no draft
    tree = tree.replace(live=tree.live & (tree.depth < room))
    live, bucket = decoder.controller.keep(state.control, turn.load, turn.spec,
                                           _shown(decoder, tree),
                                           buckets_of(decoder, turn.frontier.root.shape[0]))
    turn = turn.replace(asks=jnp.bool_(False), tree=tree, live=live,
                        bucket=jax.lax.pmax(bucket, ROWS))
    broken = (turn.frontier.live & tree.broken).sum(dtype=jnp.int32)
    counters = state.counters.replace(broken=state.counters.broken + broken)
    return state.replace(draft=draft, counters=counters), turn


def _shown(decoder: Decoder, tree: DraftTree) -> DraftTree:
    """What a controller sees of a tree. Where drafts are tested as drawn, nothing that was drawn:
    a node that is verified for its token has another law (non-anticipation, DSpark)."""
    if not RULES.resolve(decoder.rule).needs_proposal:
        return tree
    return tree.replace(tokens=jnp.zeros_like(tree.tokens), logq=jnp.zeros_like(tree.logq),
                        score_gap=jnp.zeros_like(tree.score_gap), proposal=None)


def plain_round(decoder: Decoder, params: Params, drafter_params: Params, state: RolloutState,
                turn: Turn) -> RolloutState:
    """One token of every live row, by the same operations with a drafter and without."""
    bucket = Bucket(turn.frontier.root.shape[0], 1)
    tree = roots(turn.frontier.root, turn.frontier.live, 1)
    verdict, path = verify_in(decoder, params, drafter_params, state.cache, turn, tree, tree.live,
                              bucket, 0)
    return conclude(decoder, drafter_params, state, turn, jnp.int32(bucket.packed), verdict, path)


def drafted_round(decoder: Decoder, params: Params, drafter_params: Params, state: RolloutState,
                  turn: Turn) -> tuple[RolloutState, Array]:
    """The verification of a tree that is more than roots.

    Returns:
      The state, and the tokens i32[B] that it committed.
    """
    buckets = buckets_of(decoder, turn.frontier.root.shape[0])[1:]
    branches = [functools.partial(verify_in, decoder, params, drafter_params, state.cache, turn,
                                  bucket=b, depth=decoder.drafter.depth) for b in buckets]
    verdict, path = jax.lax.switch(turn.bucket - 1, branches, turn.tree, turn.live)
    packed = jnp.asarray([b.packed for b in buckets], jnp.int32)[turn.bucket - 1]
    seen = acceptance.observe(state.seen, turn.tree, path, verdict, turn.frontier)
    state = conclude(decoder, drafter_params, state.replace(seen=seen), turn, packed, verdict, path)
    return state, verdict.count


def conclude(decoder: Decoder, drafter_params: Params, state: RolloutState, turn: Turn,
             packed: Array, verdict: Verdict, path: Path) -> RolloutState:
    """What every round ends with: its tokens are committed, and the drafter learns of them."""
    frontier = turn.frontier
    last = jnp.take_along_axis(verdict.tokens, jnp.maximum(verdict.count - 1, 0)[:, None], 1)
    return state.replace(
        cache=commit.append(state.cache, path, verdict.count),
        root=jnp.where(verdict.count > 0, last[:, 0], state.root),
        sequences=commit.record(state.sequences, verdict, frontier),
        draft=decoder.drafter.observe(drafter_params, state.draft, frontier, verdict, path),
        counters=count(state.counters, turn, verdict, packed))


def noted(decoder: Decoder, state: RolloutState, turn: Turn, count: Array, rounds: Array
          ) -> RolloutState:
    """The state once the controller knows that `rounds` rounds committed `count` i32[B] tokens."""
    outcome = Outcome(turn.load, turn.spec, _shown(decoder, turn.tree), turn.live, turn.bucket,
                      count, rounds)
    return state.replace(control=decoder.controller.note(state.control, outcome))


def clamp(spec: SpecConfig, drafter: Drafter, rows: Array) -> tuple[SpecConfig, Array]:
    """What a policy planned, with what the shapes cannot hold changed, and whether any was, bool[].

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


def count(counters: Counters, turn: Turn, verdict: Verdict, packed: Array) -> Counters:
    """Adds one round to the counters."""
    frontier, tree = turn.frontier, turn.tree
    rows, index = frontier.live.sum(), jnp.arange(verdict.path.shape[1])[None]

    def by_origin(which: Array, origin: Array) -> Array:
        drafters = jnp.arange(counters.drafted.shape[1])
        return (which[..., None] & (origin[..., None] == drafters[None, None])).sum((0, 1))[None]

    drafted = by_origin(turn.live.at[:, 0].set(False), tree.origin)
    accepted = by_origin((index > 0) & (index < verdict.count[:, None]),
                         jnp.take_along_axis(tree.origin, verdict.path, 1))
    return counters.replace(
        rounds=counters.rounds + 1, row_rounds=counters.row_rounds + rows,
        committed=counters.committed + verdict.count.sum(),
        accepted=counters.accepted + accepted, drafted=counters.drafted + drafted,
        packed=counters.packed + packed, slots=counters.slots + frontier.live.shape[0],
        clamped=counters.clamped + turn.clamped)


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


def verify_in(decoder: Decoder, params: Params, drafter_params: Params, cache: Cache, turn: Turn,
              tree: DraftTree, live: Array, bucket: Bucket, depth: int) -> tuple[Verdict, Path]:
    """One bucket's verification: pack, forward, draw, walk, gather.

    Args:
      depth: D; results have D + 1 places a row, whatever the bucket.
    """
    frontier, rows = turn.frontier, turn.rows
    tokens, parent, level, kept, order = compact(tree, live, bucket.nodes)
    packing = pack(kept, parent, bucket.packed)
    at = (packing.row, packing.node)
    hidden, fresh, taps = transformer.tree_forward(
        decoder.arch, params, cache, tokens[at], frontier.context[packing.row] + level[at],
        packing, decoder.implementation, decoder.drafter.taps)
    logits = transformer.logits(decoder.arch, params, hidden, decode=True)
    rule = RULES.resolve(decoder.rule)
    nodes = Nodes(tokens=tokens, parent=parent, depth=level,
                  rank=jnp.take_along_axis(tree.rank, order, 1), live=kept,
                  proposal=_proposal(decoder.rule, rule, tree, order))
    target = Target(logits=logits, place=packing.place, row=packing.row,
                    position=frontier.generated[packing.row] + level[at], frontier=frontier,
                    sampling=rows, truncates=decoder.truncates)
    verdict, draws = rule.verify(nodes, target, depth)
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


def _proposal(name: str, rule: Rule, tree: DraftTree, order: Array) -> Proposal | None:
    """Returns the distributions that the bucket's nodes i32[B, n] were drawn from, if needed.

    Raises:
      ConfigError: the rule needs them and the drafter does not give them.
    """
    if not rule.needs_proposal or order.shape[1] == 1:
        return None
    proposal = tree.proposal
    if proposal is None:
        raise ConfigError(f"spec.rule = {name!r}: the drafter does not tell what it drew from; "
                          "choose rejection")
    return proposal.replace(logq=jnp.take_along_axis(proposal.logq, order[..., None], 1))


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
