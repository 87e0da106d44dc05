"""One round (plan, draft, prune, verify, commit, observe) for one data shard.

Everything here runs inside `shard_map` over the data axes: arrays are a shard's own, and what
selects a branch or ends a loop is reduced over all shards first, so all shards decide alike.
"""

import functools

import jax
import jax.numpy as jnp

from specrl_jax.config import ConfigError
from specrl_jax.control import acceptance
from specrl_jax.control.buckets import Bucket
from specrl_jax.control.protocol import Outcome, prune_within
from specrl_jax.draft.tree import compact, roots
from specrl_jax.model import transformer
from specrl_jax.model.transformer import LayerKV, Packing
from specrl_jax.rollout.plan import NOT_FORCED, Decoder, Pruned, RoundPlan, buckets_of
from specrl_jax.sharding import ROWS, either, straight_line
from specrl_jax.structs import (
    Array,
    Counters,
    DrafterParams,
    DraftTree,
    Params,
    Path,
    Proposal,
    RolloutState,
    Verdict,
)
from specrl_jax.verify import commit, repetition
from specrl_jax.verify.protocol import Nodes, Rule, Target
from specrl_jax.verify.registry import RULES


def draft(decoder: Decoder, drafter_params: DrafterParams, state: RolloutState, planned: RoundPlan
          ) -> tuple[RolloutState, DraftTree]:
    """Proposes a tree for the live rows."""
    frontier, spec = planned.frontier, planned.plan.spec
    tree, drafter_state = decoder.drafter.propose(
        drafter_params, state.draft, frontier, planned.rows, spec,
        functools.partial(acceptance.survive, state.estimate))
    broken = (frontier.live & tree.broken).sum(dtype=jnp.int32)
    counters = state.counters
    counters = counters.replace(broken=counters.broken + broken,
                                draft_rounds=counters.draft_rounds + 1,
                                draft_depth=counters.draft_depth + spec.depth)
    room = planned.load.room[:, None]  # a round's last token needs no draft
    tree = tree.replace(live=tree.live & (tree.depth < room))
    return state.replace(draft=drafter_state, counters=counters), tree


def prune(decoder: Decoder, state: RolloutState, planned: RoundPlan, tree: DraftTree, force: Array
          ) -> Pruned:
    """Chooses which nodes of a tree are verified, and in which bucket.

    A forced depth verifies all that was drafted, a forced bucket only the roots.
    """
    buckets, plan = buckets_of(decoder, tree.live.shape[0]), planned.plan
    shown = _shown(decoder, tree)

    def forced() -> tuple[Array, Array]:
        roots_only = jnp.arange(tree.live.shape[1])[None] == 0
        free = force[1] == NOT_FORCED
        live, bucket = prune_within(plan.spec, tree.replace(live=tree.live & (roots_only | free)),
                                   buckets)
        return live, jnp.where(free, bucket, force[1])

    live, bucket = either(
        force[0] == NOT_FORCED,
        lambda: decoder.controller.prune(state.control, plan, planned.load, shown, buckets),
        forced)
    return Pruned(tree=tree, live=live, bucket=jax.lax.pmax(bucket, ROWS))


def _shown(decoder: Decoder, tree: DraftTree) -> DraftTree:
    """Returns what a controller may see of a tree.

    Where drafts are tested as drawn, that is nothing that was drawn: a node that is verified
    because of its token has another law (non-anticipation, DSpark).
    """
    if not RULES.resolve(decoder.rule).needs_proposal:
        return tree
    return tree.replace(tokens=jnp.zeros_like(tree.tokens), logq=jnp.zeros_like(tree.logq),
                        score_gap=jnp.zeros_like(tree.score_gap), proposal=None)


def plain_round(decoder: Decoder, params: Params, drafter_params: DrafterParams,
                state: RolloutState, planned: RoundPlan) -> RolloutState:
    """Commits one token of every live row, by the same operations with a drafter and without."""
    bucket = Bucket(planned.frontier.root.shape[0], 1)
    tree = roots(planned.frontier.root, planned.frontier.live, 1)
    verdict, path = verify_in(decoder, params, drafter_params, state, planned, tree, tree.live,
                              bucket, 0)
    return commit_round(decoder, drafter_params, state, planned, None, jnp.int32(bucket.packed),
                        verdict, path)


def drafted_round(decoder: Decoder, params: Params, drafter_params: DrafterParams,
                  state: RolloutState, planned: RoundPlan, pruned: Pruned
                  ) -> tuple[RolloutState, Array]:
    """Verifies the pruned trees and commits the accepted path.

    Returns:
      The state, and the committed tokens i32[B].
    """
    buckets = buckets_of(decoder, planned.frontier.root.shape[0])
    branches = [functools.partial(verify_in, decoder, params, drafter_params, state, planned,
                                  bucket=b, depth=decoder.drafter.depth) for b in buckets]
    verdict, path = jax.lax.switch(pruned.bucket, branches, pruned.tree, pruned.live)
    packed = jnp.asarray([b.packed for b in buckets], jnp.int32)[pruned.bucket]
    seen = acceptance.observe(state.seen, pruned.tree, path, verdict, planned.frontier)
    state = commit_round(decoder, drafter_params, state.replace(seen=seen), planned, pruned,
                         packed, verdict, path)
    return state, verdict.count


def commit_round(decoder: Decoder, drafter_params: DrafterParams, state: RolloutState,
                 planned: RoundPlan, pruned: Pruned | None, packed: Array, verdict: Verdict,
                 path: Path) -> RolloutState:
    """Commits a verdict to the cache and the sequences, and shows it to the drafter.

    Args:
      pruned: None after a plain round.
    """
    frontier = planned.frontier
    last = jnp.take_along_axis(verdict.tokens, jnp.maximum(verdict.count - 1, 0)[:, None], 1)
    return state.replace(
        cache=commit.append(state.cache, path, verdict.count),
        root=jnp.where(verdict.count > 0, last[:, 0], state.root),
        sequences=commit.record(state.sequences, verdict, frontier),
        draft=decoder.drafter.observe(drafter_params, state.draft, frontier, verdict, path),
        counters=count(state.counters, planned, pruned, verdict, packed))


def observe(decoder: Decoder, state: RolloutState, planned: RoundPlan, pruned: Pruned,
            count: Array, rounds: Array) -> RolloutState:
    """Shows the controller the `rounds` i32[] that ran by a plan and the tokens they committed.

    Args:
      count: i32[B].
    """
    outcome = Outcome(planned.load, _shown(decoder, pruned.tree), pruned.live, pruned.bucket,
                      count, rounds)
    return state.replace(control=decoder.controller.observe(state.control, planned.plan, outcome))


def count(counters: Counters, planned: RoundPlan, pruned: Pruned | None, verdict: Verdict,
          packed: Array) -> Counters:
    """Adds one round to the counters."""
    live = planned.frontier.live
    counters = counters.replace(
        rounds=counters.rounds + 1, row_rounds=counters.row_rounds + live.sum(),
        committed=counters.committed + verdict.count.sum(), packed=counters.packed + packed,
        slots=counters.slots + live.shape[0], clamped=counters.clamped + planned.clamped)
    return counters if pruned is None else _count_drafts(counters, pruned, verdict)


def _count_drafts(counters: Counters, pruned: Pruned, verdict: Verdict) -> Counters:
    index = jnp.arange(verdict.path.shape[1])[None]

    def by_origin(which: Array, origin: Array) -> Array:
        drafters = jnp.arange(counters.drafted.shape[1])
        return (which[..., None] & (origin[..., None] == drafters[None, None])).sum((0, 1))[None]

    drafted = by_origin(pruned.live.at[:, 0].set(False), pruned.tree.origin)
    accepted = by_origin((index > 0) & (index < verdict.count[:, None]),
                         jnp.take_along_axis(pruned.tree.origin, verdict.path, 1))
    return counters.replace(accepted=counters.accepted + accepted,
                            drafted=counters.drafted + drafted)


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
        order = jnp.cumsum(flat, dtype=jnp.int32) - 1
        if straight_line():  # `nonzero` adds up places, which accelerators do in a loop
            found = flat[None] & (order[None] == jnp.arange(packed)[:, None])
            index = jnp.where(found, jnp.arange(flat.shape[0], dtype=jnp.int32)[None], 0).sum(1)
        else:
            index = jnp.nonzero(flat, size=packed, fill_value=0)[0].astype(jnp.int32)
        place = jnp.where(flat, order, 0).reshape(live.shape)
    return Packing(row=index // nodes, node=index % nodes, place=place, parent=parent)


def verify_in(decoder: Decoder, params: Params, drafter_params: DrafterParams,
              state: RolloutState, planned: RoundPlan, tree: DraftTree, live: Array,
              bucket: Bucket, depth: int) -> tuple[Verdict, Path]:
    """One bucket's verification: pack, forward, draw, walk, gather.

    Args:
      depth: D; results have D + 1 places a row, whatever the bucket.
    """
    frontier, rows = planned.frontier, planned.rows
    tokens, parent, level, pruned, order = compact(tree, live, bucket.nodes)
    packing = pack(pruned, parent, bucket.packed)
    at = (packing.row, packing.node)
    hidden, fresh, taps = transformer.tree_forward(
        decoder.arch, params, state.cache, tokens[at], frontier.context[packing.row] + level[at],
        packing, decoder.implementation, decoder.drafter.taps)
    logits = transformer.logits(decoder.arch, params, hidden, decode=True)
    if state.sequences.said is not None:
        said = state.sequences.said.at[frontier.seq].get(mode="clip")
        logits = repetition.penalize(logits, decoder.repetition_penalty, said, tokens, packing,
                                     min(depth, bucket.nodes - 1))
    rule = RULES.resolve(decoder.rule)
    nodes = Nodes(tokens=tokens, parent=parent, depth=level,
                  rank=jnp.take_along_axis(tree.rank, order, 1), live=pruned,
                  proposal=_proposal(decoder.rule, rule, tree, order))
    target = Target(logits=logits, place=packing.place, row=packing.row,
                    position=frontier.generated[packing.row] + level[at], frontier=frontier,
                    sampling=rows, truncates=decoder.truncates, min_p=decoder.min_p)
    verdict, draws = rule.verify(nodes, target, depth)
    along = jnp.take_along_axis(packing.place, verdict.path, 1)
    if taps is not None:
        features = decoder.drafter.project(drafter_params, taps, decode=True)
        taps = jnp.moveaxis(features, 0, -1)[along]
    original = jnp.take_along_axis(order, verdict.path, 1)
    rows_of = jnp.arange(live.shape[0])[:, None]
    draws = jnp.zeros(live.shape, jnp.int32).at[rows_of, order].set(draws, unique_indices=True)
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


def _along(fresh: LayerKV, place: Array) -> Array:
    """The path's keys and values, f[D+1, L, 2, G, E, B], of all layers' new ones, each [G, E, W].

    One array, and in plain decoding one operation: some for each layer would cost it 2 % on a CPU.

    Args:
      place: i32[B, D+1] of the path in W.
    """
    batch, width = place.shape
    if isinstance(fresh, tuple):  # of stacked layers
        both = jnp.stack(fresh, 1).reshape(-1, *fresh[0].shape[1:])
    else:
        both = jnp.concatenate([a[None] for kv in fresh for a in kv])
    shape = (width, both.shape[0] // 2, 2, *both.shape[1:-1], batch)
    if width == 1:  # roots alone, in order
        return both.reshape(shape)
    return jnp.moveaxis(both[..., place.T], -2, 0).reshape(shape)
