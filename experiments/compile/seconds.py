"""Seconds of an RL step: its rollout simulated over a trace, from the seconds of single programs.

A program has two figures: the least time, by arithmetic over FLOPs, bytes and links (work.py), and
for TPUs the compiler's clock. Neither knows stragglers, links under load, or the host.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specrl_jax.runtime.hardware import Chip
from specrl_jax.structs import Json

from . import work
from .clock import CLOCKS, LINKS, costliest
from .traces import Trace
from .work import Model, Work

Round = Callable[[int, float, bool], float]
"""Rows of a data shard, cached tokens of all of them, whether it drafts -> seconds of a round."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The seconds of one RL step."""

    parts: dict[str, float]  # rollout, and the rest of its programs
    plain: float  # of the rollout without drafts

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Cost:
    """A round at one number of rows, by the clock."""

    rows: int
    fixed: float  # seconds that do not depend on the context
    token: float  # seconds of attention for each cached token


def nodes_of(model: Model, rows: int) -> int:
    """Returns the nodes that a drafted round verifies for each of `rows`; 1 if it cannot draft."""
    spec = model.config.spec
    return min(spec.nodes, spec.max_packed // rows) if model.drafts else 1


def least_round(model: Model, chip: Chip) -> Round:
    """Returns the least seconds of rounds."""
    def seconds(rows: int, context: float, drafts: bool) -> float:
        nodes = nodes_of(model, rows) if drafts else 1
        drafting = _least(chip, work.draft_work(model, rows)) if drafts else 0.0
        return drafting + _least(chip, work.round_work(model, rows, context, nodes))

    return seconds


def least_rest(model: Model, chip: Chip, trace: Trace) -> dict[str, float]:
    """Returns the least seconds of a step's largest other programs: prefill, update, publish, and
    the drafter's."""
    config = model.config
    prompt = config.rollout.max_prompt_tokens / 2
    lengths = prompt + trace.responses(config.sequences, config.rollout.max_new_tokens)
    tokens, pairs = float(lengths.sum()), float((lengths**2).sum() / 2)
    done = {"prefill": work.prefill_work(model, config.prompts_per_step / model.shards, prompt),
            "update": work.update_work(model, tokens, pairs), "publish": work.publish_work(model)}
    if model.drafts and config.distill.when != "off":
        share = min(config.distill.batch / len(lengths), 1)
        done["drafter"] = work.distill_work(model, share * tokens, share * pairs)
    return {name: _least(chip, each) * (config.rl.updates if name == "update" else 1)
            for name, each in done.items()}


def _least(chip: Chip, done: Work) -> float:
    return max(chip.least_seconds(done.flops, done.moved),
               done.sent / LINKS.get(chip.name, np.inf))


def clocked_round(least: Round, plain: Sequence[Cost], drafted: Sequence[Cost]) -> Round:
    """Returns the seconds of rounds by the clock at any number of rows.

    Costs are those at some numbers of rows. Between them the ratio to the least time lies on a
    line, beyond them it is constant: the least time has the bend from memory to FLOPs.
    """
    def seconds(rows: int, context: float, drafts: bool) -> float:
        costs = sorted(drafted if drafts else plain, key=lambda cost: cost.rows)
        known = [cost.rows for cost in costs]
        ratios = [cost.fixed / least(cost.rows, 0, drafts) for cost in costs]
        token = np.interp(rows, known, [cost.token for cost in costs])
        return float(least(rows, 0, drafts) * np.interp(rows, known, ratios) + token * context)

    return seconds


def cost(account: Json, chip: Chip, rows: int, slots: int) -> Cost:
    """Returns a round's cost from its `clock.account`.

    Args:
      slots: of a row's cache, all of which the account reads.
    """
    parts = costliest(account["where"])
    hertz, attention = CLOCKS[chip.name], parts.pop("attention", 0)
    return Cost(rows, parts.total() / hertz, attention / hertz / (rows * slots))


def update_seconds(model: Model, chip: Chip, account: Json) -> float:
    """Returns the seconds of a step's policy updates; their loop of unknown length is that over
    micro-batches, at full length."""
    config = model.config
    micro = config.sequences / config.rl.minibatches / config.learner.micro_batch
    cycles = sum(sum(parts.values()) * (micro if place.startswith("/loop x?") else 1)
                 for place, parts in account["where"].items())
    return cycles / CLOCKS[chip.name] * config.rl.minibatches * config.rl.updates


def step(model: Model, round_of: Round, rest: dict[str, float], trace: Trace) -> Step:
    """Simulates a step's rollout: slots are refilled, the batch shrinks, a round drafts if that
    pays. Data shards run in step, so the fullest decides; between two ends of a sequence nothing
    changes but the context."""
    config, shapes = model.config, model.shapes
    lengths = trace.responses(config.sequences, config.rollout.max_new_tokens).astype(float)
    waiting = [collections.deque(part) for part in lengths.reshape(shapes.shards, -1)]
    left = np.zeros((shapes.shards, shapes.batch))
    context, prompt = np.zeros_like(left), config.rollout.max_prompt_tokens / 2
    total = plain_total = 0.0
    while True:
        for shard, slot in np.argwhere(left <= 0):
            if waiting[shard]:
                left[shard, slot], context[shard, slot] = waiting[shard].popleft(), prompt
        live = left > 0
        if not live.any():
            return Step({"rollout": total} | rest, plain_total)
        rows = min(size for size in shapes.batches if size >= live.sum(1).max())
        ahead = left[live].min()
        cached = float((context * live).sum(1).max() + ahead / 2 * live.sum(1).max())
        token = plain = round_of(rows, cached, False)
        if (nodes := nodes_of(model, rows)) > 1:
            committed = trace.accept_length(min(config.spec.depth, nodes - 1))
            token = min(plain, round_of(rows, cached, True) / committed)
        total, plain_total = total + ahead * token, plain_total + ahead * plain
        left, context = np.where(live, left - ahead, left), context + live * ahead
