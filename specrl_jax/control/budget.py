"""`budget`: verify the nodes that pay, in the bucket and to the depth that pay most.

A round is worth its weighted tokens less `speed` times its cost in plain rounds, where `speed` is
the best rate of tokens that rounds of this load are expected to give; maximising each round's own
rate would be myopic. DSpark's prefix scheduler and Seer's marginal benefit, with a rate in place of
a first drop.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import ControlConfig, SpecOptions
from specrl_jax.control import cost_model, draft_yield, protocol
from specrl_jax.control.buckets import Bucket
from specrl_jax.control.cost_model import CostEstimate, CostTable, RoundCosts
from specrl_jax.control.draft_yield import DraftYield, calibration_ratio
from specrl_jax.control.protocol import Controller, Limits, Outcome, Plan, make_spec
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array, DraftTree, LaunchRecord, Load, carrier

UNDECIDED = -1  # whether to draft, when a rollout begins
REPLAN = 32  # plain rounds for which a plan stands at most: a decision takes 7 % of a short round
HYSTERESIS = 0.25  # plain rounds' worth of loss before drafting is switched on or off
EXPLORE = 0.003  # share of rounds that may be spent on drafting again to see whether it pays


class Budget(struct.PyTreeNode):
    """The controller's state."""

    costs: CostEstimate
    yields: DraftYield
    drafting: Array  # i32[] 1, 0, or UNDECIDED
    regret: Array  # f32[] plain rounds that the other choice would have saved, lately
    idle: Array  # f32[] rounds since a round drafted, in earlier rollouts too
    unread: Array  # f32[] positions of a row that the drafter has not read
    spent: Array  # f32[buckets + 2] expected seconds of the launch, see cost_model.learn


class Decision(struct.PyTreeNode):
    """What a plan was made of."""

    drafting: Array  # i32[] from now on
    more: Array  # f32[] regret that a round like this adds
    settled: Array  # bool[] whether regret begins anew
    unread: Array  # f32[]
    price: Array  # f32[buckets] worth of a bucket's time, in tokens of a row of weight 1
    costs: RoundCosts


def make(control: ControlConfig, spec: SpecOptions, limits: Limits) -> Controller:
    """Returns the controller of control.policy = budget."""

    def init(costs: CostTable | None) -> Budget:
        zero, buckets = np.float32(0), max(map(len, limits.buckets.values()))
        return carrier(
            Budget, costs=cost_model.estimate(costs, limits),
            yields=draft_yield.prior(max(limits.depth, 1)), drafting=np.int32(UNDECIDED),
            regret=zero, idle=zero, unread=zero, spent=np.zeros(buckets + 2, np.float32))

    def plan(state: Budget, load: Load) -> Plan:
        rows, context = load.live.shape[0], protocol.longest_context(load)
        costs = cost_model.at(state.costs, limits, rows, context)
        unread = jnp.where(state.drafting == UNDECIDED, context, state.unread)
        steps, valid_for, decision = decide(state, limits.buckets[rows], load, costs, unread)
        bounds = make_spec(0, limits.branch, limits.nodes, 0, limits.mix)
        return Plan(bounds.replace(depth=steps), valid_for, decision)

    def prune(state: Budget, plan: Plan, load: Load, tree: DraftTree, buckets: Sequence[Bucket]
              ) -> tuple[Array, Array]:
        weight = (row_weights(load, state.costs.table, limits, control.length_weight)
                  if control.length_weight else load.live.astype(jnp.float32))
        return fill(tree, weight, calibration_ratio(state.yields), plan.notes.price, buckets)

    def end_chunk(state: Budget, launch: LaunchRecord) -> tuple[Budget, Mapping[str, float]]:
        costs, report = cost_model.learn(state.costs, limits, launch, np.asarray(state.spent),
                                         control.cost_updates == "online")
        state = state.replace(costs=costs, spent=np.zeros(state.spent.shape, np.float32))
        if launch.last:  # a drafter has read no prompt when the next rollout begins
            state = state.replace(drafting=np.int32(UNDECIDED), regret=np.float32(0))
        return state, report

    return Controller(init=init, plan=plan, prune=prune, observe=observe, end_chunk=end_chunk)


def observe(state: Budget, plan: Plan, outcome: Outcome) -> Budget:
    """Adds rounds to the yield of drafts, the launch's expected seconds, and the regret."""
    noted, load, rounds = plan.notes, outcome.load, outcome.rounds.astype(jnp.float32)
    steps, drafts = plan.spec.depth, plan.spec.depth > 0
    nodes = outcome.live & (jnp.arange(outcome.live.shape[1])[None] > 0)
    expected = jnp.where(nodes, outcome.tree.survival, 0).sum()
    nodes_seen = draft_yield.count_nodes(outcome.tree, load.live, state.yields.count.shape[0])
    rows, tokens, expected, nodes_seen = jax.lax.psum(
        (load.live.sum().astype(jnp.float32), outcome.count.sum().astype(jnp.float32), expected,
         nodes_seen), ROWS)
    verify, draft, catch_up = noted.costs
    spent = jnp.concatenate([
        jnp.where(jnp.arange(state.spent.shape[0] - 2) == outcome.bucket, verify[outcome.bucket],
                  0.0),
        (draft[steps] + jnp.where(drafts, noted.unread * catch_up, 0.0))[None], verify[:1]])
    return state.replace(
        yields=draft_yield.update(state.yields, nodes_seen, rows, steps, expected,
                                  tokens - rounds * rows, rounds),
        drafting=noted.drafting,
        regret=jnp.where(noted.settled, 0.0, jnp.maximum(state.regret + rounds * noted.more, 0.0)),
        idle=jnp.where(drafts, 0.0, state.idle + rounds),
        unread=jnp.where(drafts, 0.0, noted.unread + rounds), spent=state.spent + rounds * spent)


def decide(state: Budget, buckets: Sequence[Bucket], load: Load, costs: RoundCosts, unread: Array
           ) -> tuple[Array, Array, Decision]:
    """Decides the depth of the next round, i32[], and for how many rounds that stands, i32[].

    A rollout begins with drafts where they gain more than reading its prompts costs. Later,
    drafting begins once it would have saved its catch-up and HYSTERESIS, if the tokens left pay for
    the catch-up, and ends once it has lost HYSTERESIS. While it is off, a round now and then drafts
    one step, to see whether drafts have become better.
    """
    verify, draft, catch_up = costs
    plain = jnp.maximum(verify[0], 1e-9)
    if len(buckets) == 1 or draft.shape[0] == 1:  # there is nothing to choose
        none = Decision(state.drafting, jnp.float32(0), jnp.bool_(False), unread,
                        verify / plain, costs)
        return jnp.int32(0), jnp.int32(REPLAN), none
    tokens, rounds = foresee(state.yields, buckets, load, verify, draft)
    speed = jnp.maximum((tokens / rounds).max(), 1.0)  # tokens a row in a plain round's time
    worth = (tokens - speed * rounds).max(1)
    on, undecided = state.drafting == 1, state.drafting == UNDECIDED
    depth = jnp.argmax(worth[1:]).astype(jnp.int32) + 1
    advantage, behind = worth[depth] - worth[0], catch_up * unread / plain
    owed = jnp.where(advantage > 0, speed * catch_up / plain, 0.0)  # waiting adds to it
    more = jnp.where(on, -advantage, advantage + owed)
    regret = jnp.maximum(state.regret + more, 0.0)
    limit = HYSTERESIS + jnp.where(on, 0.0, speed * behind)
    pays = (advantage * protocol.mean_of_rows(load, load.expected_left)
            > speed * behind * tokens[depth].max())
    switch = (regret > limit) & jnp.where(on, advantage < 0, pays)
    drafting = jnp.where(undecided, pays, on ^ switch)
    looks = rounds_to_look(state.idle, draft[1] / plain + behind, catch_up / plain)
    steps = jnp.where(drafting, depth, jnp.where(looks <= 0, 1, 0)).astype(jnp.int32)
    begins = jnp.where(pays, 1 + (limit - regret) / jnp.maximum(advantage, 1e-9), REPLAN)
    stands = jnp.where(undecided | switch, 1, jnp.minimum(begins, jnp.ceil(looks)))
    return steps, jnp.clip(stands, 1, REPLAN).astype(jnp.int32), Decision(
        drafting.astype(jnp.int32), more, switch | undecided, unread, speed * verify / plain, costs)


def foresee(yields: DraftYield, buckets: Sequence[Bucket], load: Load, verify: Array, draft: Array
            ) -> tuple[Array, Array]:
    """Returns f32[D+1, buckets] expected tokens a row of a round, and its cost in plain rounds.

    Drafts like the last ones fill a bucket likeliest first. No more tokens come than rows have room
    for on average.
    """
    rows = jnp.maximum(protocol.mean_rows(load), 1e-6)
    nodes, mass = (jnp.pad(jnp.cumsum(a, 0), ((1, 0), (0, 0)))[: draft.shape[0]]
                   for a in (yields.count, yields.mass))  # [D+1, bins] of a row
    packed, widest = (jnp.asarray(a, jnp.float32) for a in zip(*buckets, strict=True))
    room = jnp.minimum(packed / rows, widest) - 1  # [buckets]
    before = jnp.cumsum(nodes, 1) - nodes
    taken = jnp.clip((room[None, :, None] - before[:, None]) / jnp.maximum(nodes, 1e-6)[:, None],
                     0.0, 1.0)
    gain = calibration_ratio(yields) * (taken * mass[:, None]).sum(2)  # [D+1, buckets]
    rounds = (verify[None] + draft[:, None]) / jnp.maximum(verify[0], 1e-9)
    tokens = jnp.minimum(1 + gain, jnp.maximum(protocol.mean_of_rows(load, load.room), 1.0))
    return tokens, jnp.maximum(rounds, 1e-6)


def rounds_to_look(idle: Array, cost: Array, growth: Array) -> Array:
    """Returns f32[] plain rounds until a round may draft one step, to see whether it pays again.

    A trial costs `cost` plain rounds and `growth` more with each round of waiting; EXPLORE of the
    `idle` rounds since the last draft pay for it. At least 1 / sqrt(EXPLORE) rounds pass between
    two trials.
    """
    owed = jnp.maximum(cost - EXPLORE * idle, 0.0) / jnp.maximum(EXPLORE - growth, 1e-9)
    return jnp.maximum(owed, EXPLORE**-0.5 - idle)


def fill(tree: DraftTree, weight: Array, trusted: Array, price: Array, buckets: Sequence[Bucket]
         ) -> tuple[Array, Array]:
    """Selects the likeliest nodes that fill the most valuable bucket.

    Args:
      weight: f32[B] of rows, 0 where they are not live.
      trusted: f32[] accepted tokens per token that survival predicts.
      price: f32[buckets] of each bucket, in tokens of a row of weight 1.

    Returns:
      live bool[B, N], closed under parent as in `prune_within`; bucket i32[].
    """
    batch, nodes = tree.live.shape
    score = protocol.node_scores(tree, weight[:, None] * tree.survival)
    widest = jnp.asarray([b.nodes for b in buckets])[:, None, None]
    fits = tree.live[None] & (protocol.rank_in_row(score)[None] < widest)
    order = jnp.argsort(-score.reshape(-1), stable=True)
    sorted_fits = fits.reshape(len(buckets), -1)[:, order]
    packed = jnp.asarray([b.packed for b in buckets])[:, None]
    kept = sorted_fits & (jnp.cumsum(sorted_fits, 1) <= packed)
    worth = jnp.where(jnp.isfinite(score), score, 0.0).reshape(-1)[order]
    gain, total = jax.lax.psum((jnp.where(kept, worth[None], 0.0).sum(1), weight.sum()), ROWS)
    bucket = jnp.argmax(trusted * gain - price * total).astype(jnp.int32)
    live = jnp.zeros(batch * nodes, bool).at[order].set(kept[bucket], unique_indices=True)
    return live.reshape(batch, nodes), bucket


def row_weights(load: Load, table: CostTable, limits: Limits, strength: float) -> Array:
    """Returns f32[B] weights of live rows, 1 on average, by the tokens that each still has to come.

    A token of the k-th longest row saves what a round of k rows costs more than one of k - 1.
    Where small batches cost nearly as much as large ones, long rows are what counts. While
    sequences wait, all are alike.
    """
    sizes, rows = sorted(limits.buckets), np.arange(load.live.shape[0] + 1)
    plain = jnp.stack([table.verify[list(limits.buckets).index(s), 0, 0] for s in sizes])
    line = np.stack([np.interp(rows, [0, *sizes], unit) for unit in np.eye(len(sizes) + 1)[1:]], 1)
    seconds = line.astype(np.float32) @ jax.lax.cummax(plain)  # of a plain round, by live rows
    mine, other = load.expected_left[:, None], load.expected_left[None]
    longer, alike = ((of & load.live[None]).sum(1) for of in (other > mine, other == mine))
    saved = seconds[longer + alike] - seconds[longer]  # which of equal rows ends last is not known
    mean = jnp.maximum(seconds[load.live.sum()] / jnp.maximum(load.live.sum(), 1), 1e-12)
    weight = 1 - strength + strength * saved / jnp.maximum(alike, 1) / mean
    return jnp.where(load.live, jnp.where(load.waiting > 0, 1.0, weight), 0.0)
