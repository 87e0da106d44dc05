"""`budget`: verify the nodes that pay, in the bucket and to the depth that pay most.

A round is worth its weighted tokens less `speed` times what it takes in plain rounds, `speed` being
what rounds of such a load are to give at best: to take the fastest round each time would be myopic.
It is foreseen and not a running mean, because other loads have other speeds: tokens of a few rows
are no measure of what a round of many should give. DSpark's prefix scheduler (papers: DSpark,
Seer's marginal benefit) with a rate instead of a first drop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import ControlConfig
from specrl_jax.control import cost_model
from specrl_jax.control.adaptive import (
    FREE,
    HOLD,
    Adaptive,
    Bounds,
    Policy,
    average,
    context_of,
    rows_of,
    table_of,
)
from specrl_jax.control.cost_model import Bucket, Table
from specrl_jax.control.harvest import trust
from specrl_jax.control.protocol import Outcome, place_in_row
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Array, DraftTree, Load, SpecConfig

MARGIN = 0.01  # gain, of a plain round, below which a depth is not changed


@struct.dataclass
class Budget:
    """What a switch is waiting for."""

    drafting: Array  # i32[] whether drafting is on; FREE when a rollout begins
    regret: Array  # f32[] plain rounds that the other of on and off would have saved, lately
    idle: Array  # f32[] rounds since one drafted, those of earlier rollouts too


def budget(control: ControlConfig, bounds: Bounds, seed: int) -> Policy:
    """The policy of control.policy = budget."""

    def init() -> Budget:
        return Budget(drafting=np.int32(FREE), regret=np.float32(0), idle=np.float32(0))

    def plan(state: Adaptive, table: Table, load: Load) -> tuple[Array, Array, Array]:
        chosen = choose_depth(state, table, load, control)
        return chosen.steps, jnp.int32(bounds.branch), jnp.int32(bounds.nodes)

    def keep(state: Adaptive, table: Table, load: Load, spec: SpecConfig, tree: DraftTree,
             buckets: tuple[Bucket, ...]) -> tuple[Array, Array]:
        verify, _ = cost_model.at(table, context_of(load))
        speed = speed_of(*foresee(state, table, load))
        price = speed * verify / jnp.maximum(verify[0], 1e-9)
        return fill(tree, load, trust(state.harvest), price, buckets)

    def note(before: Adaptive, outcome: Outcome) -> Budget:
        table = table_of(before, outcome.load)
        chosen = choose_depth(before, table, outcome.load, control, outcome.rounds)
        idle = jnp.where(outcome.spec.steps > 0, 0.0, before.own.idle + outcome.rounds)
        return Budget(drafting=chosen.drafting, regret=chosen.regret, idle=idle)

    def hold(state: Adaptive, table: Table, load: Load) -> Array:
        return choose_depth(state, table, load, control).hold

    return Policy(init=init, plan=plan, keep=keep, hold=hold,
                  begin=lambda own: init().replace(idle=own.idle), note=note, tries=True)


def speed_of(tokens: Array, rounds: Array) -> Array:
    """f32[] tokens a row in the time of a plain round, at best; never below 1, what off gives."""
    return jnp.maximum((tokens / rounds).max(), 1.0)


def fill(tree: DraftTree, load: Load, believed: Array, price: Array, buckets: tuple[Bucket, ...]
         ) -> tuple[Array, Array]:
    """The likeliest nodes that fill the bucket which is worth most.

    Args:
      believed: f32[] tokens for each that survival promises.
      price: f32[buckets] of each bucket, in tokens of a row of weight 1.

    Returns:
      live bool[B, N], closed under parent: survival never grows along a path and weights are equal
      along it; bucket i32[].
    """
    batch, nodes = tree.live.shape
    weight = jnp.where(load.live, load.weight, 0.0)[:, None]
    score = jnp.where(tree.live, weight * tree.survival, -1.0)
    score = score.at[:, 0].set(jnp.where(tree.live[:, 0], jnp.inf, -1.0))
    widest = jnp.asarray([b.nodes for b in buckets])[:, None, None]
    fits = (tree.live[None] & (place_in_row(score)[None] < widest)).reshape(len(buckets), -1)
    order = jnp.argsort(-score.reshape(-1), stable=True)
    sorted_fits = fits[:, order]
    packed = jnp.asarray([b.packed for b in buckets])[:, None]
    kept = sorted_fits & (jnp.cumsum(sorted_fits, 1) <= packed)
    worth = jnp.where(jnp.isfinite(score), score, 0.0).reshape(-1)[order]
    gain, total = jax.lax.psum(
        (jnp.where(kept, worth[None], 0.0).sum(1), weight.sum()), ROWS)
    bucket = jnp.argmax(believed * gain - price * total).astype(jnp.int32)
    live = jnp.zeros(batch * nodes, bool).at[order].set(kept[bucket]).reshape(batch, nodes)
    return live, bucket


def foresee(state: Adaptive, table: Table, load: Load) -> tuple[Array, Array]:
    """f32[D+1, buckets] tokens a row of a round, and the plain rounds that it takes.

    The drafts of a round are foreseen as the last ones were, and fill a bucket likeliest first. No
    more come than rows have room for on average: where one more token ends all, it is worth a
    round.
    """
    harvest, rows = state.harvest, jnp.maximum(rows_of(load), 1e-6)
    verify, draft = cost_model.at(table, context_of(load))
    nodes, mass = (jnp.pad(jnp.cumsum(a, 0), ((1, 0), (0, 0)))[: draft.shape[0]]
                   for a in (harvest.count, harvest.mass))  # [D+1, bins] of a row
    room = jnp.minimum(table.packed / rows, table.nodes) - 1  # [buckets]
    before = jnp.cumsum(nodes, 1) - nodes
    taken = jnp.clip((room[None, :, None] - before[:, None]) / jnp.maximum(nodes, 1e-6)[:, None],
                     0.0, 1.0)
    gain = trust(harvest) * (taken * mass[:, None]).sum(2)  # [D+1, buckets]
    rounds = (verify[None] + draft[:, None]) / jnp.maximum(verify[0], 1e-9)
    tokens = jnp.minimum(1 + gain, jnp.maximum(average(load, load.room), 1.0))
    return tokens, jnp.maximum(rounds, 1e-6)  # more than none, where nothing is measured yet


class Choice(NamedTuple):
    """The next round."""

    steps: Array  # i32[] depth
    drafting: Array  # i32[] whether drafting is on
    regret: Array  # f32[] after it
    hold: Array  # i32[] rounds in which nothing changes for a constant advantage; at most HOLD


def choose_depth(state: Adaptive, table: Table, load: Load, control: ControlConfig,
                 times: Array | int = 1) -> Choice:
    """What the next round drafts, and how `times` rounds like it leave the policy.

    A rollout begins with drafts where these are to bring more than reading its prompts takes. Later
    drafting begins once what it would have saved has grown to what its catching up takes and
    control.hysteresis, if what is left pays for catching up, and ends once it has lost the latter:
    a load that jumps to and fro switches nothing, unless it pays each time. While it is off, a
    round now and then drafts one step, to see whether drafts have become better.
    """
    own = state.own
    if table.packed.shape[0] == 1 or table.draft.shape[0] == 1:
        return Choice(jnp.int32(0), own.drafting, own.regret, jnp.int32(HOLD))
    tokens, rounds = foresee(state, table, load)
    lag = state.lag[str(load.live.shape[0])]
    tokens = jnp.where(jnp.arange(tokens.shape[0])[:, None] > 0, tokens / lag, tokens)
    speed = speed_of(tokens, rounds)
    worth = (tokens - speed * rounds).max(1)
    on, undecided = own.drafting == 1, own.drafting == FREE
    best, last = jnp.argmax(worth[1:]).astype(jnp.int32) + 1, jnp.where(on, state.steps, 0)
    depth = jnp.where((last > 0) & (worth[best] - worth[last] < MARGIN), last, best)
    advantage = worth[depth] - worth[0]
    verify, draft = cost_model.at(table, context_of(load))
    plain = jnp.maximum(verify[0], 1e-9)
    behind = table.catch_up * state.missed / plain
    owed = jnp.where(advantage > 0, speed * table.catch_up / plain, 0.0)  # waiting adds to it
    more = jnp.where(on, -advantage, advantage + owed)
    grown = jnp.maximum(own.regret + more, 0.0)  # by one round: plan and note decide alike
    limit = control.hysteresis + jnp.where(on, 0.0, speed * behind)
    pays = advantage * average(load, load.expected_left) > speed * behind * tokens[depth].max()
    switch = (grown > limit) & jnp.where(on, advantage < 0, pays)
    drafting = jnp.where(undecided, pays, on ^ switch)
    looks = rounds_to_look(own.idle, draft[1] / plain + behind, table.catch_up / plain,
                           control.explore)
    probe = looks <= 0
    steps = jnp.where(drafting, depth, jnp.where(probe, 1, 0)).astype(jnp.int32)
    regret = jnp.maximum(own.regret + times * more, 0.0)
    begins = jnp.where(pays, 1 + (limit - grown) / jnp.maximum(advantage, 1e-9), HOLD)
    waits = jnp.where(undecided | switch, 1, jnp.minimum(begins, jnp.ceil(looks)))
    return Choice(steps, drafting.astype(jnp.int32), jnp.where(switch | undecided, 0.0, regret),
                  jnp.clip(waits, 1, HOLD).astype(jnp.int32))


def rounds_to_look(idle: Array, takes: Array, more: Array, explore: float) -> Array:
    """f32[] plain rounds until one may draft a step, to see whether drafts have become better.

    Args:
      idle: f32[] rounds since one drafted.
      takes: f32[] plain rounds that the look takes now, and
      more: f32[] with each round of waiting.
      explore: share of all rounds that looks may take; at least 1 / sqrt(explore) lie between two.
        Where `more` is above it, rounds of earlier rollouts alone pay for a look.
    """
    if not explore:
        return jnp.float32(jnp.inf)
    owed = jnp.maximum(takes - explore * idle, 0.0) / jnp.maximum(explore - more, 1e-9)
    return jnp.maximum(owed, explore**-0.5 - idle)
