"""The one owner of drafter weights in a run: versions, verification, repair and training.

A trainer calls `before_rollout`, `collect` and `after_update` in every step. `make` chooses the
class: `DrafterManager` if nothing has weights, `FrozenDrafter`, or `LearningDrafter`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.config import Config, check
from specrl_jax.distill import health, schedule
from specrl_jax.distill.health import MISMATCH, NOT_FINITE, Probe, Summary
from specrl_jax.distill.online import OnlineDistillation
from specrl_jax.distill.update import UpdateResult
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.structs import DrafterParams, Json, Metrics, PyTree, Rollout

Sample = Callable[[int], tuple[Rollout, np.ndarray, np.ndarray]]
"""Generates the prompts of a step outside RL: (rollout, rewards f32[Q], advantages f32[Q])."""


class DrafterManager:
    """The manager of a run whose drafter has no weights: it does nothing."""

    def compile(self, say: Callable[[str], None]) -> None:
        """Checks the first version and compiles whatever a step may run."""

    def before_rollout(self, step: int) -> Metrics:
        """Verifies what is about to draft and repairs it."""
        return {}

    def collect(self, rollout: Rollout, reward: np.ndarray, advantage: np.ndarray, step: int
                ) -> Metrics:
        """Reads a finished rollout while the policy that generated it is still published."""
        return {}

    def after_update(self, step: int) -> Metrics:
        """Trains and publishes the drafter if that is due."""
        return {}

    def account(self, spent: float, saved: float) -> Metrics:
        """Adds a step's seconds: spent on the drafter outside rollouts, saved by speculation."""
        return {}

    def arrays(self) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint."""
        return {}

    def meta(self) -> Json:
        """Returns what else a checkpoint holds, as JSON values."""
        return {}

    def restore(self, arrays: dict[str, PyTree], meta: Json) -> None:
        """Continues from a checkpoint's `arrays` and `meta`."""


class Published(NamedTuple):
    """A version that passed all checks."""

    version: int
    weights: tuple[DrafterParams, ...]  # of each part
    summaries: tuple[Summary, ...]  # of the versioned parts
    state: LearnerState | None = None  # of one that learns, from which training continues

    @property
    def checksum(self) -> int:
        return sum(summary.checksum for summary in self.summaries) % 2**32

    @property
    def fault(self) -> str:
        """A fault that the weights show by themselves; "" if none."""
        return next((summary.fault for summary in self.summaries if summary.fault), "")


class FrozenDrafter(DrafterManager):
    """Verifies weights that do not learn. After a fault the last good version drafts again.

    `good` is that version; while `disabled` nothing is drafted until a good version is published;
    `seconds` f64[2] were spent on the drafter and saved by speculation.
    """

    def __init__(self, sampler: Sampler, prompts: Sequence[Sequence[int]], probe_tokens: int,
                 warn: Callable[[str], None]) -> None:
        self.sampler, self._warn = sampler, warn
        self._versioned = sampler.drafters.versioned
        name = sampler.drafters.parts[self._versioned[0]].name
        self.probe = Probe(sampler, name, prompts, probe_tokens)
        self.good = Published(sampler.drafter_version, (), ())
        self.disabled, self.faults, self.seconds = False, 0, np.zeros(2)

    def compile(self, say: Callable[[str], None]) -> None:
        restored = bool(self.good.weights)
        if not restored:
            weights = self.sampler.drafter_weights
            self.good = self.good._replace(weights=weights, summaries=self._summarize(weights))
        if self.good.fault and not self.disabled:
            self._disable(self.good.fault)
        self._verify()
        rate, fault = self.probe.rate, self.probe.start()
        if restored:
            self.probe.rate = rate
        elif fault and not self.disabled:
            self._disable(fault)

    def before_rollout(self, step: int) -> Metrics:
        fault = self._verify()
        if fault and not self.disabled:
            self._report(f"drafter version {self.good.version}: {fault}; publishing the last good "
                         f"version again")
            self.sampler.publish_drafter(self.good.weights, self.good.version)
            if self._verify():
                self._disable(fault)
        return {"drafter/faults": self.faults, "drafter/disabled": float(self.disabled),
                "checksum/drafter": self.good.checksum} | _named(fault)

    def collect(self, rollout: Rollout, reward: np.ndarray, advantage: np.ndarray, step: int
                ) -> Metrics:
        if self.sampler.broken and not self.disabled:  # the rollout switched drafting off
            self.faults, self.disabled = self.faults + 1, True
        return {}

    def account(self, spent: float, saved: float) -> Metrics:
        self.seconds += (spent, saved)
        net = float(self.seconds[1] - self.seconds[0])
        return {"time/distill": spent, "time/speculation_net": net}

    def _verify(self) -> str:
        """Compares what the next rollout would draft with to the last good version."""
        sampler, good, weights = self.sampler, self.good, self.sampler.drafter_weights
        if not health.same_shapes(weights, good.weights):
            return MISMATCH
        for found, expected in zip(self._summarize(weights), good.summaries, strict=True):
            if fault := health.fault_of(found, expected):
                return fault
        same = sampler.drafter_version == good.version and health.equal(
            sampler.drafter_params, sampler.drafters.bind(sampler.params, weights))
        return "" if same else MISMATCH

    def _summarize(self, weights: Sequence[DrafterParams]) -> tuple[Summary, ...]:
        """Summarizes the versioned parts; those of the last good version are not read again."""
        known = {place: (self.good.weights[place], summary)
                 for place, summary in zip(self._versioned, self.good.summaries, strict=False)}
        return tuple(
            known[place][1] if place in known and health.identical(known[place][0], weights[place])
            else health.summarize(weights[place]) for place in self._versioned)

    def _report(self, text: str) -> None:
        self.faults += 1
        self._warn(text)

    def _disable(self, fault: str) -> None:
        self._warn(f"drafter version {self.good.version}: {fault}; nothing is drafted until a good "
                   f"version is published")
        self.disabled = True
        self.sampler.draft_to(0)

    def _enable(self) -> None:
        self.disabled = self.sampler.broken = False
        self.sampler.draft_to(None)

    def arrays(self) -> dict[str, PyTree]:
        return {"drafter_seconds": self.seconds}

    def meta(self) -> Json:
        return {"version": self.good.version, "checksum": self.good.checksum,
                "disabled": self.disabled, "faults": self.faults, "rate": self.probe.rate}

    def restore(self, arrays: dict[str, PyTree], meta: Json) -> None:
        self.seconds = np.array(arrays["drafter_seconds"])
        self._restore(self.sampler.drafter_weights, meta, None)

    def _restore(self, weights: Sequence[DrafterParams], meta: Json,
                 state: LearnerState | None) -> None:
        """Publishes `weights`: a new version if their files were replaced meanwhile."""
        self.disabled, self.faults = meta["disabled"], meta["faults"]
        self.probe.rate, version = meta["rate"], meta["version"]
        self.good = Published(version, tuple(weights), self._summarize(weights), state)
        if self.good.checksum != meta["checksum"]:
            self.good = self.good._replace(version=version + 1)
            self._warn(f"draft.path or draft.model holds other weights than when this run was "
                       f"left: drafter version {version + 1}")
            if self.good.fault:
                self._disable(self.good.fault)
            elif self.disabled:
                self._enable()
        if self.disabled:
            self.sampler.draft_to(0)
        self.sampler.publish_drafter(self.good.weights, self.good.version)


class LearningDrafter(FrozenDrafter):
    """Trains the drafter's trainable part on rollouts, and publishes each good version.

    `state` is the learner's; its parameters are the next version's weights.
    """

    def __init__(self, config: Config, sampler: Sampler, prompts: Sequence[Sequence[int]],
                 sample: Sample, warn: Callable[[str], None]) -> None:
        super().__init__(sampler, prompts, config.distill.probe_tokens, warn)
        self._options, self._sample = config.distill, sample
        self._part = sampler.drafters.trainable or 0
        self.training = OnlineDistillation(config, sampler)
        self.state = self.training.init(self._head["weights"])

    @property
    def _head(self) -> DrafterParams:
        """The trainable part as the last good version, or what was loaded, has it."""
        return (self.good.weights or self.sampler.drafter_weights)[self._part]

    def compile(self, say: Callable[[str], None]) -> None:
        super().compile(say)
        if self.good.state is None:
            self.good = self.good._replace(state=self.state)
        self.training.compile(say, self.state)

    def before_rollout(self, step: int) -> Metrics:
        metrics: Metrics = {"distill/updates": 0}
        if self._options.when == "once" and step == 0:
            for number in range(self._options.rollouts):
                self.training.store(*self._sample(number), number)
            metrics |= self._train(step)
        return metrics | super().before_rollout(step)

    def collect(self, rollout: Rollout, reward: np.ndarray, advantage: np.ndarray, step: int
                ) -> Metrics:
        metrics = super().collect(rollout, reward, advantage, step)
        training = self.training
        if (result := training.take_result()) is not None:
            metrics |= self._publish(result)
        if schedule.collects(self._options, step):
            metrics |= self._repair()
            training.store(rollout, reward, advantage, step)
        if self._options.when == "trigger":
            metrics |= training.measure_staleness(self.state.params, step)
        if self._options.overlap and schedule.due(self._options, step, training.staleness):
            training.start(self.state, step)
        return metrics

    def after_update(self, step: int) -> Metrics:
        metrics: Metrics = {"distill/buffer_bytes": self.training.buffer.nbytes}
        if not self._options.overlap and schedule.due(self._options, step, self.training.staleness):
            metrics |= self._train(step)
        return metrics

    def _train(self, step: int) -> Metrics:
        """Runs the updates of one training and publishes their result."""
        repaired = self._repair()
        metrics = self._publish(self.training.run(self.state, step))
        if "drafter/fault" not in metrics:  # else the old version drafts on, as stale as it was
            self.training.staleness = schedule.forget()
        return metrics | repaired

    def _repair(self) -> Metrics:
        """Returns to the last good state if the learner's weights were damaged since."""
        good, params = self.good.state, self.state.params
        if good is None or health.identical(params, good.params):
            return {}
        fault = health.fault_of(health.summarize(params), health.summarize(good.params))
        if fault:
            self._report(f"the learner's drafter: {fault}; learning from version "
                         f"{self.good.version} again")
            self.state = good
        return _named(fault)

    def _publish(self, result: UpdateResult) -> Metrics:
        """Makes the result the next version, unless it has a fault: then the old one stays."""
        state, updates, seconds = result
        weights = list(self.good.weights)
        weights[self._part] = {"weights": state.params, "vocab": self._head["vocab"]}
        new = Published(self.good.version + 1, tuple(weights), self._summarize(weights), state)
        learned = any(update["applied"] for update in updates)
        fault = new.summaries[0].fault if learned else NOT_FINITE
        if not fault:
            self.sampler.publish_drafter(new.weights, new.version)
            fault = self.probe.check()
        if fault:
            old = self.good
            self._report(f"drafter version {new.version}: {fault}; version {old.version} drafts on")
            self.sampler.publish_drafter(old.weights, old.version)
            self.state = old.state or self.state
        else:
            self.good, self.state = new, state
            if (self.disabled or self.sampler.broken) and not new.fault:
                self._enable()
        last = updates[-1]
        return {f"distill/{name}": float(last[name])
                for name in ("loss", "grad_norm", "accept_length")} | {
            f"distill/alpha/{j}": float(a) for j, a in enumerate(updates[0]["alpha"])} | {
            "distill/updates": len(updates), "time/distill_updates": seconds,
            "distill/applied": float(min(update["applied"] for update in updates))} | _named(fault)

    def arrays(self) -> dict[str, PyTree]:
        return super().arrays() | self.training.arrays(self.state) | {
            "drafter": {"weights": self.state.params, "vocab": self._head["vocab"]},
            "drafter_optimizer": self.state.optimizer}

    def meta(self) -> Json:
        return super().meta() | self.training.meta()

    def restore(self, arrays: dict[str, PyTree], meta: Json) -> None:
        self.seconds = np.array(arrays["drafter_seconds"])
        self.state = LearnerState(arrays["drafter"]["weights"], arrays["drafter_optimizer"])
        weights = list(self.sampler.drafter_weights)
        weights[self._part] = arrays["drafter"]
        self._restore(weights, meta, self.state)
        self.training.restore(arrays, meta)


def _named(fault: str) -> Metrics:
    return {"drafter/fault": fault} if fault else {}


def make(config: Config, sampler: Sampler, prompts: Sequence[Sequence[int]], sample: Sample,
         warn: Callable[[str], None]) -> DrafterManager:
    """Returns the manager of the sampler's drafter.

    Args:
      prompts: token ids; the first few are the probe's.
      warn: called with a line about each fault.

    Raises:
      ConfigError: nothing can learn although distill.when is not off, or options cannot work.
    """
    drafters = sampler.drafters
    if config.distill.when != "off":
        check(drafters.trainable is not None, "distill.when", config.distill.when,
              f"spec.drafter = {config.spec.drafter!r} with control.policy = "
              f"{config.control.policy!r} has nothing that learns; choose eagle, or off here")
        return LearningDrafter(config, sampler, prompts, sample, warn)
    return FrozenDrafter(sampler, prompts, 0, warn) if drafters.versioned else DrafterManager()
