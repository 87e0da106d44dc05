"""The life of a run's drafter: its versions, their verification and repair, and its training.

`LifecycleState` is a value; a lifecycle is programs and config, and returns the next state. A
trainer calls `before_rollout`, `collect`, `after_update` and `account` in every step. `make`
chooses the class: `Lifecycle` if nothing has weights, `VerifiedLifecycle`, or `LearningLifecycle`.

`before_rollout` compares weights with the last good version. A rollout itself detects drafts whose
scores are not finite, and the trainer then calls `switch_off`.
"""

from collections.abc import Callable, Sequence

import numpy as np
from flax import struct

from specrl_jax.config import Config, check
from specrl_jax.distill import health, schedule
from specrl_jax.distill.health import MISMATCH, NOT_FINITE, Probe, Summary
from specrl_jax.distill.metrics import by_depth
from specrl_jax.distill.online import OnlineDistillation, OnlineState
from specrl_jax.distill.update import UpdateResult
from specrl_jax.rl.experience import Experience
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.state import PublishedDrafter, PublishedPolicy, RolloutInputs, Speculation
from specrl_jax.structs import DrafterParams, Json, Metrics, PyTree

GenerateExperience = Callable[[int], Experience]
"""Generates and rewards the prompts of a step outside RL."""


class Version(struct.PyTreeNode):
    """Weights, numbered; those of `LifecycleState.good` have passed all checks."""

    weights: tuple[DrafterParams, ...]  # of each part
    learner: LearnerState | None = None  # of the trainable part, from which training continues
    number: int = struct.field(pytree_node=False, default=0)
    summaries: tuple[Summary, ...] = struct.field(pytree_node=False, default=())  # versioned parts

    @property
    def checksum(self) -> int:
        return sum(summary.checksum for summary in self.summaries) % 2**32

    @property
    def fault(self) -> str:
        """The first fault detectable from the weights alone; "" if there is none."""
        return next((summary.fault for summary in self.summaries if summary.fault), "")


class LifecycleState(struct.PyTreeNode):
    """The drafter of a run.

    `published` is what rollouts read. After a fault that could not be repaired it stays disabled
    until a good version is published. `good` is the last good version, and the learner's state.
    `rate` is what the probe expects (None: not probed yet); `seconds` f64[2] were spent on the
    drafter and saved by speculation.
    """

    published: PublishedDrafter
    good: Version
    online: OnlineState | None = None
    seconds: np.ndarray = struct.field(default_factory=lambda: np.zeros(2))
    rate: float | None = struct.field(pytree_node=False, default=None)
    faults: int = struct.field(pytree_node=False, default=0)


Updated = tuple[LifecycleState, Metrics]


class Lifecycle:
    """The life of a drafter without weights: it is only bound to each policy."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def init(self, published: PublishedDrafter) -> LifecycleState:
        """Returns the state whose first version is what was loaded."""
        return LifecycleState(published, Version(published.weights, number=published.version))

    def compile(self, state: LifecycleState, policy: PublishedPolicy, speculation: Speculation,
                say: Callable[[str], None]) -> LifecycleState:
        """Checks the first version and compiles whatever a step may run."""
        return state

    def before_rollout(self, state: LifecycleState, policy: PublishedPolicy,
                       speculation: Speculation, step: int, sample: GenerateExperience) -> Updated:
        """Verifies what is about to draft and repairs it; trains it once before RL if asked to."""
        return state, {}

    def switch_off(self, state: LifecycleState) -> LifecycleState:
        """Drafts nothing until a good version is published, since a rollout's drafts had scores
        that are not finite."""
        if not state.published.enabled:
            return state
        return _enabled(state, False).replace(faults=state.faults + 1)

    def collect(self, state: LifecycleState, policy: PublishedPolicy, speculation: Speculation,
                experience: Experience, step: int) -> Updated:
        """Does nothing here. `LearningLifecycle` publishes the result of overlapped training and
        stores features, while the policy that generated the rollout is still published.
        """
        return state, {}

    def after_update(self, state: LifecycleState, policy: PublishedPolicy,
                     speculation: Speculation, step: int) -> Updated:
        """Binds the drafter to the new policy; `LearningLifecycle` then trains it if that is due.
        """
        return self.bind(state, policy), {}

    def account(self, state: LifecycleState, spent: float, saved: float) -> Updated:
        """Adds a step's seconds: spent on the drafter outside rollouts, saved by speculation."""
        return state, {}

    def bind(self, state: LifecycleState, policy: PublishedPolicy) -> LifecycleState:
        """Returns the state with the published weights bound to another policy."""
        published = state.published
        return state.replace(published=self._sampler.publish_drafter(
            policy, published.weights, published.version, published.enabled))

    def _publish_good(self, state: LifecycleState, policy: PublishedPolicy) -> LifecycleState:
        return state.replace(published=self._sampler.publish_drafter(
            policy, state.good.weights, state.good.number, state.published.enabled))

    # What a checkpoint holds: neither bound parameters nor weights that files hold.

    def arrays(self, state: LifecycleState) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint."""
        return {}

    def meta(self, state: LifecycleState) -> Json:
        """Returns what else a checkpoint holds, as JSON values."""
        return {}

    def restore(self, state: LifecycleState, policy: PublishedPolicy, arrays: dict[str, PyTree],
                meta: Json) -> LifecycleState:
        """Returns the state of a checkpoint's `arrays` and `meta`; `state` is that of `init`."""
        return self._publish_good(state, policy)


class VerifiedLifecycle(Lifecycle):
    """The life of weights that do not learn. After a fault the last good version drafts again."""

    def __init__(self, sampler: Sampler, prompts: Sequence[Sequence[int]], probe_tokens: int,
                 warn: Callable[[str], None]) -> None:
        super().__init__(sampler)
        self._warn, self._versioned = warn, sampler.drafters.versioned
        name = sampler.drafters.parts[self._versioned[0]].name
        self._probe = Probe(sampler, name, prompts, probe_tokens)

    def init(self, published: PublishedDrafter) -> LifecycleState:
        state = super().init(published)
        return state.replace(good=state.good.replace(
            summaries=self._summarize(published.weights, state.good)))

    def compile(self, state: LifecycleState, policy: PublishedPolicy, speculation: Speculation,
                say: Callable[[str], None]) -> LifecycleState:
        if state.good.fault and state.published.enabled:
            state = self._disable(state, state.good.fault)
        self._verify(state, policy)  # compiles it
        if state.rate is not None:
            return state
        fault, rate = self._probe.check(
            RolloutInputs(policy, state.published, speculation), None)
        state = state.replace(rate=rate)
        return self._disable(state, fault) if fault and state.published.enabled else state

    def before_rollout(self, state: LifecycleState, policy: PublishedPolicy,
                       speculation: Speculation, step: int, sample: GenerateExperience) -> Updated:
        fault, good = self._verify(state, policy), state.good
        if fault and state.published.enabled:
            state = self._report(state, f"drafter version {good.number}: {fault}; publishing the "
                                 f"last good version again")
            state = self._publish_good(state, policy)
            if self._verify(state, policy):
                state = self._disable(state, fault)
        return state, {"drafter/faults": state.faults, "checksum/drafter": good.checksum,
                       "drafter/disabled": float(not state.published.enabled)} | _named(fault)

    def account(self, state: LifecycleState, spent: float, saved: float) -> Updated:
        seconds = state.seconds + (spent, saved)
        return state.replace(seconds=seconds), {
            "time/distill": spent, "time/speculation_net": float(seconds[1] - seconds[0])}

    def _verify(self, state: LifecycleState, policy: PublishedPolicy) -> str:
        """Returns how what rollouts read differs from the last good version; "" if it does not."""
        published, good = state.published, state.good
        if not health.same_shapes(published.weights, good.weights):
            return MISMATCH
        actual = self._summarize(published.weights, good)
        for summary, expected in zip(actual, good.summaries, strict=True):
            if fault := health.fault_of(summary, expected):
                return fault
        same = published.version == good.number and health.equal(
            published.params, self._sampler.drafters.bind(policy.params, published.weights))
        return "" if same else MISMATCH

    def _summarize(self, weights: Sequence[DrafterParams], known: Version) -> tuple[Summary, ...]:
        """Summarizes the versioned parts; those of the `known` version are not read again."""
        summaries = dict(zip(self._versioned, known.summaries, strict=False))
        return tuple(
            summaries[part] if part in summaries and health.identical(
                known.weights[part], weights[part]) else health.summarize(weights[part])
            for part in self._versioned)

    def _report(self, state: LifecycleState, text: str) -> LifecycleState:
        self._warn(text)
        return state.replace(faults=state.faults + 1)

    def _disable(self, state: LifecycleState, fault: str) -> LifecycleState:
        self._warn(f"drafter version {state.good.number}: {fault}; nothing is drafted until a good "
                   f"version is published")
        return _enabled(state, False)

    def arrays(self, state: LifecycleState) -> dict[str, PyTree]:
        return {"drafter_seconds": state.seconds}

    def meta(self, state: LifecycleState) -> Json:
        return {"version": state.good.number, "checksum": state.good.checksum,
                "disabled": not state.published.enabled, "faults": state.faults,
                "rate": state.rate}

    def restore(self, state: LifecycleState, policy: PublishedPolicy, arrays: dict[str, PyTree],
                meta: Json) -> LifecycleState:
        """As `Lifecycle.restore`. Weights whose files were replaced are a new version."""
        enabled, number = not meta["disabled"], meta["version"]
        if state.good.checksum != meta["checksum"]:
            enabled, number = True, number + 1
            self._warn(f"draft.path or draft.model holds other weights than when this run was "
                       f"left: drafter version {number}")
        state = state.replace(
            good=state.good.replace(number=number), faults=meta["faults"], rate=meta["rate"],
            seconds=np.array(arrays["drafter_seconds"]))
        return super().restore(_enabled(state, enabled), policy, arrays, meta)


class LearningLifecycle(VerifiedLifecycle):
    """The life of a drafter whose trainable part learns from rollouts: each good version drafts."""

    def __init__(self, config: Config, sampler: Sampler, prompts: Sequence[Sequence[int]],
                 warn: Callable[[str], None]) -> None:
        super().__init__(sampler, prompts, config.distill.probe_tokens, warn)
        self._options, self._part = config.distill, sampler.drafters.trainable or 0
        self.training = OnlineDistillation(config, sampler)

    def _head(self, state: LifecycleState) -> DrafterParams:
        """Returns the trainable part of the last good version."""
        return state.good.weights[self._part]

    def _learner(self, state: LifecycleState) -> LearnerState:
        assert state.good.learner is not None
        return state.good.learner

    def _online(self, state: LifecycleState) -> OnlineState:
        assert state.online is not None
        return state.online

    def init(self, published: PublishedDrafter) -> LifecycleState:
        state = super().init(published)
        online, learner = self.training.init(self._head(state)["weights"])
        return state.replace(online=online, good=state.good.replace(learner=learner))

    def compile(self, state: LifecycleState, policy: PublishedPolicy, speculation: Speculation,
                say: Callable[[str], None]) -> LifecycleState:
        state = super().compile(state, policy, speculation, say)
        say("compiling the drafter's update")
        self.training.compile(policy, self._learner(state), self._head(state))
        return state

    def before_rollout(self, state: LifecycleState, policy: PublishedPolicy,
                       speculation: Speculation, step: int, sample: GenerateExperience) -> Updated:
        metrics: Metrics = {"distill/updates": 0}
        if self._options.when == "once" and step == 0:
            for number in range(self._options.rollouts):
                state = self._store(state, policy, sample(number), number)
            state, trained = self._train(state, policy, speculation, step)
            metrics |= trained
        state, verified = super().before_rollout(state, policy, speculation, step, sample)
        return state, metrics | verified

    def collect(self, state: LifecycleState, policy: PublishedPolicy, speculation: Speculation,
                experience: Experience, step: int) -> Updated:
        metrics: Metrics = {}
        training, options = self.training, self._options
        if (result := self._online(state).result) is not None:
            state = state.replace(online=self._online(state).replace(running=None))
            state, metrics = self._adopt(state, policy, speculation, result)
        if schedule.collects(options, step):
            state = self._store(state, policy, experience, step)
        if options.when == "trigger":
            online, measured = training.measure_staleness(
                self._online(state), policy, self._head(state), step)
            state, metrics = state.replace(online=online), metrics | measured
        if options.overlap and self._due(state, step):
            state = state.replace(online=training.start(
                self._online(state), policy, self._head(state), self._learner(state), step))
        return state, metrics

    def after_update(self, state: LifecycleState, policy: PublishedPolicy,
                     speculation: Speculation, step: int) -> Updated:
        state, _ = super().after_update(state, policy, speculation, step)
        metrics: Metrics = {"distill/buffer_bytes": self.training.ring.nbytes}
        if self._options.overlap or not self._due(state, step):
            return state, metrics
        state, trained = self._train(state, policy, speculation, step)
        return state, metrics | trained

    def _due(self, state: LifecycleState, step: int) -> bool:
        return schedule.due(self._options, step, self._online(state).staleness)

    def _store(self, state: LifecycleState, policy: PublishedPolicy, experience: Experience,
               step: int) -> LifecycleState:
        return state.replace(online=self.training.store(
            self._online(state), policy, self._head(state), experience, step))

    def _train(self, state: LifecycleState, policy: PublishedPolicy, speculation: Speculation,
               step: int) -> Updated:
        """Runs the updates of one training and publishes their result."""
        result = self.training.run(self._online(state), policy, self._head(state),
                                   self._learner(state), step)
        state, metrics = self._adopt(state, policy, speculation, result)
        if "drafter/fault" not in metrics:  # else the old version drafts on, as stale as it was
            state = state.replace(online=self._online(state).replace(staleness=schedule.forget()))
        return state, metrics

    def _adopt(self, state: LifecycleState, policy: PublishedPolicy, speculation: Speculation,
               result: UpdateResult) -> Updated:
        """Makes the result of training the next version, unless it has a fault: then the old one
        stays. Learned weights are published here and nowhere else."""
        new, old = self._candidate(state.good, result.learner), state.good
        learned = any(update["applied"] for update in result.metrics)
        fault = new.summaries[0].fault if learned else NOT_FINITE  # the trainable part is first
        published, rate = state.published, state.rate
        if not fault:
            published = self._sampler.publish_drafter(
                policy, new.weights, new.number, published.enabled or not new.fault)
            fault, rate = self._probe.check(
                RolloutInputs(policy, published, speculation), rate)
        if fault:
            state = self._report(state, f"drafter version {new.number}: {fault}; keeping "
                                 f"version {old.number}")
        else:
            state = state.replace(good=new, published=published, rate=rate)
        return state, _update_metrics(result) | _named(fault)

    def _candidate(self, old: Version, learner: LearnerState) -> Version:
        """Returns the version after `old`, with the weights of `learner`."""
        weights = list(old.weights)
        weights[self._part] = {"weights": learner.params, "vocab": weights[self._part]["vocab"]}
        return Version(tuple(weights), learner, old.number + 1, self._summarize(weights, old))

    def arrays(self, state: LifecycleState) -> dict[str, PyTree]:
        learner = self._learner(state)
        return super().arrays(state) | self.training.arrays(self._online(state), learner) | {
            "drafter": self._head(state), "drafter_optimizer": learner.optimizer}

    def meta(self, state: LifecycleState) -> Json:
        return super().meta(state) | self.training.meta(self._online(state))

    def restore(self, state: LifecycleState, policy: PublishedPolicy, arrays: dict[str, PyTree],
                meta: Json) -> LifecycleState:
        weights, head = list(state.good.weights), arrays["drafter"]
        weights[self._part] = head
        good = state.good.replace(
            weights=tuple(weights), summaries=self._summarize(weights, state.good),
            learner=LearnerState(head["weights"], arrays["drafter_optimizer"]))
        state = state.replace(good=good, online=self.training.restore(arrays, meta))
        return super().restore(state, policy, arrays, meta)


def _enabled(state: LifecycleState, enabled: bool) -> LifecycleState:
    return state.replace(published=state.published.replace(enabled=enabled))


def _named(fault: str) -> Metrics:
    return {"drafter/fault": fault} if fault else {}


def _update_metrics(result: UpdateResult) -> Metrics:
    updates = result.metrics
    return {f"distill/{name}": float(updates[-1][name])
            for name in ("loss", "grad_norm", "accept_length")} | by_depth(
        "distill/alpha", updates[0]["alpha"]) | {
        "distill/updates": len(updates), "time/distill_updates": result.seconds,
        "distill/applied": float(min(update["applied"] for update in updates))}


def make(config: Config, sampler: Sampler, prompts: Sequence[Sequence[int]],
         warn: Callable[[str], None]) -> Lifecycle:
    """Returns the lifecycle of the sampler's drafter.

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
        return LearningLifecycle(config, sampler, prompts, warn)
    return VerifiedLifecycle(sampler, prompts, 0, warn) if drafters.versioned else Lifecycle(
        sampler)
