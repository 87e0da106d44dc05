"""Seconds of an RL step, from the least time of its programs and a simulated rollout."""

import collections
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from specrl_jax.runtime.hardware import Chip

from . import work
from .clock import LINKS
from .traces import Trace
from .work import Model, Work

# Share of a device's peak that a program of each kind reaches. These are aims, not measurements.
EFFICIENCY = {"rounds": 0.65, "drafts": 0.3, "prefill": 0.4, "update": 0.4, "drafter": 0.3,
              "publish": 0.5}
ROUND_SECONDS = 100e-6  # of a round: its small operations
COLLECTIVE_SECONDS = 5e-6  # until the first byte of a collective has arrived


@dataclasses.dataclass(frozen=True)
class Machine:
    """Some devices of one kind, and how much of their peak programs reach."""

    chip: Chip
    devices: int
    efficiency: Mapping[str, float] = dataclasses.field(default_factory=lambda: EFFICIENCY)
    round_seconds: float = ROUND_SECONDS

    def seconds(self, kind: str, done: Work) -> float:
        """Returns the predicted seconds of a program's work."""
        return (max(self.limits(done).values()) / self.efficiency[kind]
                + done.collectives * COLLECTIVE_SECONDS)

    def limits(self, done: Work) -> dict[str, float]:
        """Returns the least seconds by what limits them."""
        return {"FLOPs": done.flops / self.chip.flops, "memory": done.moved / self.chip.bandwidth,
                "links": done.sent / LINKS.get(self.chip.name, np.inf)}


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A predicted rollout."""

    seconds: float
    plain_seconds: float  # of the same without drafts
    drafting: float  # share of rounds with drafts
    bounds: Mapping[str, float]  # seconds by what limits them


@dataclasses.dataclass(frozen=True)
class Step:
    """The predicted seconds of one RL step."""

    parts: Mapping[str, float]  # rollout, prefill, update, drafter, publish
    bounds: Mapping[str, str]  # what limits each
    rollout: Rollout

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """What bounds the step: its longest part, and that part's limit."""
        longest = max(self.parts, key=lambda name: self.parts[name])
        return f"{longest} by {self.bounds[longest]}"


def step(model: Model, machine: Machine, trace: Trace,
         simulated: Callable[[Model, Machine, Trace], Rollout] | None = None) -> Step:
    """Returns the prediction for one step of a run."""
    config = model.config
    lengths = trace.responses(config.sequences, config.rollout.max_new_tokens)
    prompt = config.rollout.max_prompt_tokens / 2
    rollout = (simulated or simulate)(model, machine, trace)
    rows = prompt + lengths
    tokens, pairs = float(rows.sum()), float((rows**2).sum() / 2)
    done = {
        "prefill": work.prefill_work(model, config.prompts_per_step / model.shards, prompt),
        "update": work.update_work(model, tokens, pairs),
        "publish": work.publish_work(model)}
    if model.drafts and config.distill.when != "off":
        kept = min(config.distill.batch / len(lengths), 1)
        done["drafter"] = work.distill_work(model, kept * tokens, kept * pairs)
    parts = {"rollout": rollout.seconds}
    parts |= {kind: machine.seconds(kind, each) * (config.rl.updates if kind == "update" else 1)
              for kind, each in done.items()}
    bounds = {"rollout": max(rollout.bounds, key=lambda name: rollout.bounds[name])}
    limits = {kind: machine.limits(each) for kind, each in done.items()}
    bounds |= {kind: max(each, key=lambda name: each[name]) for kind, each in limits.items()}
    return Step(parts, bounds, rollout)


def simulate(model: Model, machine: Machine, trace: Trace) -> Rollout:
    """Simulates a rollout: slots are refilled, the batch shrinks, a round drafts if that pays.

    Data shards run in step, so the fullest shard decides. Between two ends of a sequence nothing
    changes but the context, so the simulation goes from end to end.
    """
    config, shapes = model.config, model.shapes
    lengths = trace.responses(config.sequences, config.rollout.max_new_tokens).astype(float)
    waiting = [collections.deque(part) for part in lengths.reshape(shapes.shards, -1)]
    left = np.zeros((shapes.shards, shapes.batch))
    context, prompt = np.zeros_like(left), config.rollout.max_prompt_tokens / 2
    total = plain_total = drafted_rounds = rounds = 0.0
    bounds: dict[str, float] = collections.Counter()
    while True:
        for shard, slot in np.argwhere(left <= 0):
            if waiting[shard]:
                left[shard, slot], context[shard, slot] = waiting[shard].popleft(), prompt
        live = left > 0
        if not live.any():
            break
        batch = min(size for size in shapes.batches if size >= live.sum(1).max())
        ahead = left[live].min()
        cached = float((context * live).sum(1).max() + ahead / 2 * live.sum(1).max())
        plain, plain_work = _round(model, machine, batch, cached)
        chosen, chosen_work, gain = plain, plain_work, 1.0
        nodes = min(config.spec.nodes, config.spec.max_packed // batch) if model.drafts else 1
        if nodes > 1:
            tokens = trace.accept_length(min(config.spec.depth, nodes - 1))
            drafted, drafted_work = _round(model, machine, batch, cached, nodes)
            if drafted / tokens < plain:
                chosen, chosen_work, gain = drafted, drafted_work, tokens
        count = ahead / gain
        total, plain_total = total + count * chosen, plain_total + ahead * plain
        rounds, drafted_rounds = rounds + count, drafted_rounds + count * (gain > 1)
        limits = machine.limits(chosen_work)
        bounds[max(limits, key=lambda name: limits[name])] += count * chosen
        left, context = np.where(live, left - ahead, left), context + live * ahead
    return Rollout(total, plain_total, drafted_rounds / rounds, bounds)


def _round(model: Model, machine: Machine, batch: int, context: float, nodes: int = 1
           ) -> tuple[float, Work]:
    done = work.round_work(model, batch, context, nodes)
    seconds = machine.round_seconds + machine.seconds("rounds", done)
    if nodes > 1:
        seconds += machine.seconds("drafts", work.draft_work(model, batch))
    return seconds, done


def break_even(model: Model, machine: Machine, trace: Trace) -> float | None:
    """Returns the least constant acceptance at which drafting saves time somewhere in a rollout;
    None if it never does."""
    rates = np.linspace(0, 1, 21)
    for rate in rates:
        result = simulate(model, machine, dataclasses.replace(trace, acceptance=(float(rate),)))
        if result.drafting > 0:
            return float(rate)
    return None
