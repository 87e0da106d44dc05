"""One round (plan, draft, prune, verify, commit, observe) for one data shard.

Everything here runs inside `shard_map` over the data axes: arrays are a shard's own, and what
selects a branch or ends a loop is reduced over all shards first, so all shards decide alike.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.config import ConfigError
from specrl_jax.control import acceptance
from specrl_jax.control.buckets import Bucket
from specrl_jax.control.protocol import Outcome, prune_within
from specrl_jax.draft.protocol import DraftRequest
from specrl_jax.draft.tree import compact, roots
from specrl_jax.model import transformer
from specrl_jax.model.transformer import LayerKV, Packing
from specrl_jax.rollout import record
from specrl_jax.rollout.plan import (
    NOT_FORCED,
    Decoder,
    Pruned,
    RoundPlan,
    Weights,
    buckets_of,
)
from specrl_jax.sharding import ROWS, either, straight_line, traced_device
from specrl_jax.structs import (
    Array,
    Counters,
    DraftTree,
    Frontier,
    Path,
    Proposal,
    RolloutState,
    Verdict,
)
from specrl_jax.verify import commit, repetition
from specrl_jax.verify.protocol import Head, Nodes, Target
from specrl_jax.verify.registry import RULES


@jax.named_scope("drafter")  # scopes name parts in experiments/compile/clock.py
def draft(decoder: Decoder, weights: Weights, state: RolloutState, planned: RoundPlan
          ) -> tuple[RolloutState, DraftTree]:
    """Proposes a tree for the live rows."""
    frontier, spec = planned.frontier, planned.plan.spec
    tree, drafter_state = decoder.drafter.propose(
        weights.drafter, state.draft, DraftRequest(
            frontier, planned.rows, spec, functools.partial(acceptance.survive, state.estimate)))
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

    Where drafts are tested as samples, it sees nothing that was drawn: choosing nodes by their
    tokens would change the distribution of the tokens (non-anticipation, DSpark).
    """
    if not RULES.resolve(decoder.rule).needs_proposal:
        return tree
    return tree.replace(tokens=jnp.zeros_like(tree.tokens), logq=jnp.zeros_like(tree.logq),
                        score_gap=jnp.zeros_like(tree.score_gap), proposal=None)


def plain_round(decoder: Decoder, weights: Weights, state: RolloutState, planned: RoundPlan
                ) -> RolloutState:
    """Commits one token of every live row, by the same operations with a drafter and without."""
    frontier = planned.frontier
    bucket = Bucket(packed=frontier.root.shape[0], nodes=1)
    tree = roots(frontier.root, frontier.live, 1)
    verdict, path = verify_in(decoder, weights, state, planned,
                              Pruned(tree=tree, live=tree.live, bucket=jnp.int32(0)), bucket)
    state = commit_round(decoder, weights, state, planned.frontier, tree, verdict, path)
    return state.replace(counters=count(state.counters, planned, verdict, bucket.packed))


def drafted_round(decoder: Decoder, weights: Weights, state: RolloutState, planned: RoundPlan,
                  pruned: Pruned) -> tuple[RolloutState, Array]:
    """Verifies the pruned trees and commits the accepted path.

    Returns:
      The state, and the committed tokens i32[B].
    """
    buckets = buckets_of(decoder, planned.frontier.root.shape[0])
    branches = [functools.partial(verify_in, decoder, weights, state, planned, bucket=bucket)
                for bucket in buckets]
    verdict, path = jax.lax.switch(pruned.bucket, branches, pruned)
    seen = acceptance.observe(state.seen, pruned.tree, path, verdict, planned.frontier)
    state = commit_round(decoder, weights, state.replace(seen=seen), planned.frontier, pruned.tree,
                         verdict, path)
    packed = jnp.asarray([bucket.packed for bucket in buckets], jnp.int32)[pruned.bucket]
    counters = count(state.counters, planned, verdict, packed)
    return state.replace(counters=count_drafts(counters, pruned, verdict)), verdict.count


@jax.named_scope("append")
def commit_round(decoder: Decoder, weights: Weights, state: RolloutState, frontier: Frontier,
                 tree: DraftTree, verdict: Verdict, path: Path) -> RolloutState:
    """Commits a verdict to the rows and the sequences, and records what drafters learn from."""
    if decoder.recorded is not None and state.records is not None:
        state = state.replace(records=record.add(
            state.records, decoder.recorded, tree, frontier, verdict, path))
    return commit_rows(decoder, weights, state, frontier, verdict, path).replace(
        sequences=commit.record(state.sequences, verdict, frontier))


def commit_rows(decoder: Decoder, weights: Weights, state: RolloutState, frontier: Frontier,
                verdict: Verdict, path: Path) -> RolloutState:
    """Appends the path to the cache and shows it to the drafter; the last token is the new root."""
    last = jnp.take_along_axis(verdict.tokens, jnp.maximum(verdict.count - 1, 0)[:, None], 1)
    return state.replace(
        cache=commit.append(state.cache, path, verdict.count),
        root=jnp.where(verdict.count > 0, last[:, 0], state.root),
        draft=decoder.drafter.observe(weights.drafter, state.draft, frontier, verdict, path))


def observe(decoder: Decoder, state: RolloutState, planned: RoundPlan, pruned: Pruned,
            count: Array, rounds: Array) -> RolloutState:
    """Shows the controller the `rounds` that ran by a plan and their `count` i32[B] of tokens."""
    outcome = Outcome(planned.load, _shown(decoder, pruned.tree), pruned.live, pruned.bucket,
                      count, rounds)
    return state.replace(control=decoder.controller.observe(state.control, planned.plan, outcome))


def count(counters: Counters, planned: RoundPlan, verdict: Verdict, packed: int | Array
          ) -> Counters:
    """Adds one round to the counters; its forward pass had `packed` tokens."""
    live = planned.frontier.live
    return counters.replace(
        rounds=counters.rounds + 1, row_rounds=counters.row_rounds + live.sum(),
        committed=counters.committed + verdict.count.sum(), packed=counters.packed + packed,
        slots=counters.slots + live.shape[0], clamped=counters.clamped + planned.clamped)


def count_drafts(counters: Counters, pruned: Pruned, verdict: Verdict) -> Counters:
    """Adds one round's verified and committed drafts to the counters, by drafter."""
    index = jnp.arange(verdict.path.shape[1])[None]

    def by_origin(which: Array, origin: Array) -> Array:
        drafters = jnp.arange(counters.drafted.shape[1])
        return (which[..., None] & (origin[..., None] == drafters[None, None])).sum((0, 1))[None]

    drafted = by_origin(pruned.live.at[:, 0].set(False), pruned.tree.origin)
    accepted = by_origin((index > 0) & (index < verdict.count[:, None]),
                         jnp.take_along_axis(pruned.tree.origin, verdict.path, 1))
    return counters.replace(accepted=counters.accepted + accepted,
                            drafted=counters.drafted + drafted)


class Packed(NamedTuple):
    """The nodes that one forward pass verifies."""

    nodes: Nodes  # of the bucket
    order: Array  # i32[B, n] index of each in the drafted trees
    packing: Packing

    @property
    def tokens(self) -> Array:
        """i32[W]"""
        return self.nodes.tokens[self.packing.row, self.packing.node]

    @property
    def depth(self) -> Array:
        """i32[W]"""
        return self.nodes.depth[self.packing.row, self.packing.node]


class Forwarded(NamedTuple):
    """What the actor computes after each packed node."""

    logits: Array | None  # f32[V, W]; None where the rule draws from the head
    head: Head | None  # in their place
    kv: LayerKV
    features: Array | None  # f[F, W] of the drafter's taps
    states: Array | None  # f[(A+1) * F, W] as in Records


def verify_in(decoder: Decoder, weights: Weights, state: RolloutState, planned: RoundPlan,
              pruned: Pruned, bucket: Bucket) -> tuple[Verdict, Path]:
    """Verifies pruned trees in the shapes of one bucket.

    Returns:
      The verdict and the accepted path, with D + 1 entries a row whatever the bucket.
    """
    packed = pack(decoder, pruned, bucket)
    output = forward(decoder, weights, state, planned.frontier, packed)
    verdict, drawn = draw_and_walk(decoder, planned, packed, output,
                                   decoder.drafter.depth if pruned.live.shape[1] > 1 else 0)
    return gather(pruned, packed, output, verdict, drawn)


def pack(decoder: Decoder, pruned: Pruned, bucket: Bucket) -> Packed:
    """Returns the pruned nodes at the front of each row, and their packing into one batch."""
    tree = pruned.tree
    tokens, parent, depth, live, order = compact(tree, pruned.live, bucket.nodes)
    nodes = Nodes(tokens=tokens, parent=parent, depth=depth, live=live,
                  rank=jnp.take_along_axis(tree.rank, order, 1),
                  proposal=_proposal(decoder.rule, tree, order))
    return Packed(nodes, order, packing_of(live, parent, bucket.packed))


def forward(decoder: Decoder, weights: Weights, state: RolloutState, frontier: Frontier,
            packed: Packed) -> Forwarded:
    """Runs the actor on packed nodes; logits are after the repetition penalty."""
    arch, packing = decoder.arch, packed.packing
    hidden, kv, taps = transformer.tree_forward(
        arch, weights.actor, state.cache, packed.tokens,
        frontier.context[packing.row] + packed.depth, packing, decoder.implementation,
        decoder.drafter.taps)
    features = None if taps is None else decoder.drafter.project(weights.drafter, taps, decode=True)
    states = None if decoder.recorded is None else jnp.concatenate(
        [hidden] if taps is None else [taps, hidden])
    if _draws_from_head(decoder):
        head = Head(hidden, transformer.head(arch, weights.actor))
        return Forwarded(None, head, kv, features, states)
    logits = transformer.logits(arch, weights.actor, hidden, decode=True)
    if state.sequences.said is not None:
        said = state.sequences.said.at[frontier.seq].get(mode="clip")
        edges = min(decoder.drafter.depth, packed.order.shape[1] - 1)
        logits = repetition.penalize(logits, decoder.repetition_penalty, said,
                                     packed.nodes.tokens, packing, edges)
    return Forwarded(logits, None, kv, features, states)


def _draws_from_head(decoder: Decoder) -> bool:
    """Returns whether logits need not be stored: TPUs and GPUs have kernels that draw without."""
    return (RULES.resolve(decoder.rule).draws_from_head and not decoder.truncates
            and decoder.repetition_penalty == 1 and traced_device().platform in ("tpu", "gpu"))


@jax.named_scope("draw")
def draw_and_walk(decoder: Decoder, planned: RoundPlan, packed: Packed, output: Forwarded,
                  depth: int) -> tuple[Verdict, Array]:
    """Draws the actor's token after each node and walks the trees by the rule.

    Returns:
      The verdict, whose path indexes the packed nodes, and the draws i32[B, n].
    """
    frontier, packing = planned.frontier, packed.packing
    target = Target(logits=output.logits, head=output.head, place=packing.place, row=packing.row,
                    position=frontier.generated[packing.row] + packed.depth, frontier=frontier,
                    sampling=planned.rows, truncates=decoder.truncates, min_p=decoder.min_p)
    return RULES.resolve(decoder.rule).verify(packed.nodes, target, depth)


def gather(pruned: Pruned, packed: Packed, output: Forwarded, verdict: Verdict, drawn: Array
           ) -> tuple[Verdict, Path]:
    """Gathers the accepted path; its indices and those of the draws become the drafted trees'."""
    along = jnp.take_along_axis(packed.packing.place, verdict.path, 1)
    features, states = (None if a is None else jnp.moveaxis(a, 0, -1)[along]
                        for a in (output.features, output.states))
    row = jnp.arange(len(along))[:, None]
    draw = jnp.zeros(pruned.live.shape, jnp.int32)
    path = Path(kv=along_path(output.kv, along), taps=features, states=states,
                draw=draw.at[row, packed.order].set(drawn, unique_indices=True),
                verified=pruned.live)
    return verdict.replace(path=jnp.take_along_axis(packed.order, verdict.path, 1)), path


def packing_of(live: Array, parent: Array, packed: int) -> Packing:
    """Returns the packing of a bucket's nodes, in order where all of them fit.

    Args: live bool[B, n], parent i32[B, n], packed W, at least the live nodes.
    """
    batch, nodes = live.shape
    if packed == batch * nodes:
        index = jnp.arange(packed, dtype=jnp.int32)
        place = index.reshape(batch, nodes)
    else:
        flat = live.reshape(-1)
        order = jnp.cumsum(flat, dtype=jnp.int32) - 1
        if straight_line():  # accelerators run the sum inside `nonzero` as a loop
            chosen = flat[None] & (order[None] == jnp.arange(packed)[:, None])
            index = jnp.where(chosen, jnp.arange(flat.shape[0], dtype=jnp.int32)[None], 0).sum(1)
        else:
            index = jnp.nonzero(flat, size=packed, fill_value=0)[0].astype(jnp.int32)
        place = jnp.where(flat, order, 0).reshape(live.shape)
    return Packing(row=index // nodes, node=index % nodes, place=place, parent=parent)


def _proposal(name: str, tree: DraftTree, order: Array) -> Proposal | None:
    """Returns the distributions that the bucket's nodes i32[B, n] were drawn from, if needed.

    Raises:
      ConfigError: the rule needs them and the drafter does not return them.
    """
    if not RULES.resolve(name).needs_proposal or order.shape[1] == 1:
        return None
    if tree.proposal is None:
        raise ConfigError(f"spec.rule = {name!r}: the drafter returns no distribution of its "
                          "drafts; choose rejection")
    return tree.proposal.replace(logq=jnp.take_along_axis(tree.proposal.logq, order[..., None], 1))


def along_path(fresh: LayerKV, place: Array) -> Array:
    """Returns the path's keys and values, f[D+1, L, 2, G, E, B], from each layer's [G, E, W].

    One array, and in plain decoding one operation: one a layer would cost a CPU 2 % of decoding.

    Args:
      place: i32[B, D+1] positions of the path in W.
    """
    batch, width = place.shape
    if isinstance(fresh, tuple):  # stacked layers
        both = jnp.stack(fresh, 1).reshape(-1, *fresh[0].shape[1:])
    else:
        both = jnp.concatenate([a[None] for kv in fresh for a in kv])
    shape = (width, both.shape[0] // 2, 2, *both.shape[1:-1], batch)
    if width == 1:  # roots alone, in order
        return both.reshape(shape)
    return jnp.moveaxis(both[..., place.T], -2, 0).reshape(shape)
