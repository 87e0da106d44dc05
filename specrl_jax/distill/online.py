"""Training of a drafter while RL runs: features of rollouts in, optimiser updates out.

The actor's update sees nothing of it: features come from a separate forward over the finished
rollout, under the weights that generated it, or from its verification; parameters, optimiser and
gradient norm are the drafter's own. `distill/lifecycle.py` decides whether updated weights are
published.
"""

import concurrent.futures
import time
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from flax import struct

from specrl_jax import prng, sharding
from specrl_jax.config import Config, check
from specrl_jax.distill import features, programs, schedule, teacher
from specrl_jax.distill.features import Features
from specrl_jax.distill.programs import EVALUATE, FROZEN, RECORDS, ROWS, TARGETS, UPDATE
from specrl_jax.distill.schedule import Staleness
from specrl_jax.distill.teacher import (
    Batch,
    FrozenParams,
    SequenceBatch,
    TeacherTargets,
    in_rows,
)
from specrl_jax.distill.update import Programs, UpdateResult
from specrl_jax.rl.experience import Experience
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.state import PublishedPolicy
from specrl_jax.structs import DrafterParams, Json, Metrics, PyTree

PICK, DRAW, WATCH = range(3)  # uses of random numbers


class OnlineState(struct.PyTreeNode):
    """What a drafter's training carries from step to step, besides its learner state."""

    features: Features
    staleness: Staleness
    running: concurrent.futures.Future[UpdateResult] | None = struct.field(
        pytree_node=False, default=None)  # overlapped updates

    @property
    def result(self) -> UpdateResult | None:
        """The outcome of the overlapped updates, for which it waits; None if there are none."""
        return self.running.result() if self.running else None


class OnlineDistillation:
    """The programs of a drafter's training. `head` is the trainable part: {"weights", "vocab"}.

    Raises:
      ConfigError: options that cannot work together.
    """

    def __init__(self, config: Config, sampler: Sampler) -> None:
        options, mesh = config.distill, sampler.mesh
        self.options, self._seed = options, config.seed
        self._temperature = config.rollout.temperature
        shards = sharding.shard_count(mesh)
        check(options.micro_batch % shards == 0, "distill.micro_batch", options.micro_batch,
              f"must be a multiple of the {shards} data shards")
        check(not options.overlap or mesh.size == 1, "distill.overlap", options.overlap,
              f"two programs at once over {mesh.size} devices may wait for each other; use False")
        part, arch = sampler.drafters.trainable or 0, sampler.engine.decoder.arch
        drafter = sampler.drafters.parts[part].trainable
        assert drafter is not None
        check(options.when != "trigger" or drafter.outputs is not None, "distill.when",
              options.when, "needs a trainable drafter with outputs and logits; choose interval")
        if options.when == "verification":
            check(sampler.engine.decoder.drafter.taps == drafter.taps, "draft.parts",
                  config.draft.parts, "distill.when = 'verification' needs the drafter that learns "
                  "to be the one that reads the actor; choose interval")
            check(config.rollout.repetition_penalty == 1, "rollout.repetition_penalty",
                  config.rollout.repetition_penalty, "distill.when = 'verification' learns the "
                  "distribution without it; use 1, or distill.when = 'interval'")
        self._programs = Programs(drafter, arch, options, mesh, sharding.replicated(mesh))
        self.ring = programs.make_ring(config, drafter, arch.hidden_size)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)  # runs overlapped updates

    def init(self, params: DrafterParams) -> tuple[OnlineState, LearnerState]:
        """Returns the states before the first update."""
        return OnlineState(self.ring.empty(), schedule.forget()), self._programs.init(params)

    def compile(self, policy: PublishedPolicy, learner: LearnerState, head: DrafterParams) -> None:
        """Compiles whatever a step may run."""
        self._compiled = {p.name: p.lower().compile() for p in programs.programs(
            self._programs, self.options, self.ring, learner, policy.params, head["vocab"])}

    def store(self, state: OnlineState, policy: PublishedPolicy, head: DrafterParams,
              experience: Experience, step: int) -> OnlineState:
        """Returns the state with features of a rollout, from the policy that generated it."""
        order = self._rng(step, PICK).permutation(len(experience.rewards))
        chosen = np.sort(order[: self.ring.sizes.sequences])
        batch = batch_of(experience, chosen, self.options.micro_batch, self.ring.sizes.columns,
                         self._temperature)
        targets = self._targets(policy, batch, experience, chosen)
        rows = np.asarray(self._compiled[ROWS](policy.params, head["vocab"]))
        return state.replace(features=self.ring.add(
            state.features, batch, jax.tree.map(np.asarray, targets), policy.version, rows))

    def _targets(self, policy: PublishedPolicy, batch: SequenceBatch, experience: Experience,
                 chosen: np.ndarray) -> TeacherTargets:
        """Returns the targets of a batch: from a forward of the actor, or from what verification
        computed of the sequences `chosen`."""
        texts, records = self._programs.rows(batch), experience.rollout.records
        if self.options.when != "verification":
            return self._compiled[TARGETS](policy.params, texts)
        assert records is not None
        rows = in_rows(chosen, self.options.micro_batch)
        recorded = (records.states, records.depth, experience.rollout.raw_logprob)
        return self._compiled[RECORDS](
            policy.params, texts, *self._programs.rows([a[rows] for a in recorded]))

    def measure_staleness(self, state: OnlineState, policy: PublishedPolicy, head: DrafterParams,
                          step: int) -> tuple[OnlineState, Metrics]:
        """Measures acceptance of first drafts on the newest rollout, and what entropy explains."""
        batch, targets = features.draw(state.features, self._rng(step, WATCH), self.options.batch,
                                       self.options.micro_batch, newest=True)
        noise = self._programs.rows(programs.no_noise(*batch.length.shape))
        evaluation = self._compiled[EVALUATE](
            head["weights"], self._frozen_params(state, policy, head),
            *self.put((batch, targets)), *noise)
        live = np.asarray(evaluation.live)[:, 0]
        acceptance, entropy = np.asarray(evaluation.alpha)[:, 0][live], targets.entropy[live]
        staleness, unexplained = schedule.observe(state.staleness, acceptance, entropy)
        return state.replace(staleness=staleness), {
            "distill/acceptance": float(acceptance.mean()), "distill/unexplained": unexplained,
            "distill/entropy": float(entropy.mean()), "distill/fall": float(staleness.fall)}

    def run(self, state: OnlineState, policy: PublishedPolicy, head: DrafterParams,
            learner: LearnerState, step: int) -> UpdateResult:
        """Runs the updates of one training."""
        return self.train_on(learner, self._frozen_params(state, policy, head),
                             self._draw(state, step))

    def start(self, state: OnlineState, policy: PublishedPolicy, head: DrafterParams,
              learner: LearnerState, step: int) -> OnlineState:
        """Starts the same updates in a thread; it reads copies of the features and the policy."""
        return state.replace(running=self._thread.submit(
            self.train_on, learner, self._frozen_params(state, policy, head),
            list(self._draw(state, step))))

    def train_on(self, learner: LearnerState, frozen: FrozenParams, batches: Iterable[Batch]
                 ) -> UpdateResult:
        """Runs an update on each host batch; the learner state that it is given stays readable."""
        began, updates = time.perf_counter(), []
        for batch in batches:
            learner, metrics = self._compiled[UPDATE](learner, frozen, *self.put(batch))
            updates.append({name: np.asarray(value).tolist() for name, value in metrics.items()})
        return UpdateResult(learner, updates, time.perf_counter() - began)

    def put(self, batch: Batch) -> Batch:
        """Puts a host batch on the devices, the rows split over data shards."""
        return sharding.put(programs.batch_shardings(self._programs.mesh), batch)

    def _draw(self, state: OnlineState, step: int) -> Iterator[Batch]:
        """Yields the batch of each update."""
        rng, options = self._rng(step, DRAW), self.options
        for _ in range(options.updates):
            yield features.draw(state.features, rng, options.batch, options.micro_batch)

    def _frozen_params(self, state: OnlineState, policy: PublishedPolicy, head: DrafterParams
                       ) -> FrozenParams:
        heads = sharding.put(programs.head_sharding(self._programs.mesh, self.ring),
                             np.stack(state.features.heads))
        return self._compiled[FROZEN](policy.params, head["vocab"], heads)

    def _rng(self, step: int, use: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, len(prng.STREAMS), step, use])

    # What a checkpoint holds.

    def arrays(self, state: OnlineState, learner: LearnerState) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint; waits for running updates.

        `learner` stands in for the result of overlapped updates if there is none.
        """
        stored = {"drafter_features": state.features.arrays(), "drafter_staleness": state.staleness}
        if not self.options.overlap:
            return stored
        ahead = state.result.learner if state.result else learner
        return stored | {"drafter_ahead": {"weights": ahead.params, "optimizer": ahead.optimizer}}

    def meta(self, state: OnlineState) -> Json:
        return {"ahead": state.result.metrics if state.result else None}

    def restore(self, arrays: dict[str, PyTree], meta: Json) -> OnlineState:
        """Returns the state of a checkpoint's `arrays` and `meta`."""
        running = None
        if meta["ahead"] is not None:
            ahead, running = arrays["drafter_ahead"], concurrent.futures.Future()
            learner = LearnerState(ahead["weights"], ahead["optimizer"])
            running.set_result(UpdateResult(learner, meta["ahead"], 0.0))
        return OnlineState(self.ring.restore(arrays["drafter_features"]),
                           jax.tree.map(np.asarray, arrays["drafter_staleness"]), running)


def batch_of(experience: Experience, chosen: np.ndarray, rows: int, columns: int,
             temperature: float) -> SequenceBatch:
    """Returns the sequences `chosen` i64[k] as micro-batches of `rows`, host arrays [n, b, ...]."""
    rollout = experience.rollout

    def tokens(q: int) -> np.ndarray:
        return np.concatenate([rollout.prompt[q, : rollout.prompt_length[q]],
                               rollout.tokens[q, : rollout.length[q]]])

    return teacher.batch_of(
        in_rows(chosen, rows), tokens, columns, temperature, first=rollout.prompt_length,
        length=rollout.prompt_length + rollout.length, reward=experience.rewards,
        advantage=experience.advantage)
