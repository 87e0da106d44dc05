"""Training of a drafter while RL runs: features of rollouts in, optimiser updates out.

The actor's update sees nothing of it: features come from a forward of their own over the finished
rollout, under the weights that generated it; parameters, optimiser and gradient norm are the
drafter's own. `distill/drafter.py` decides what becomes of the updated weights.
"""

import concurrent.futures
import time
from collections.abc import Callable

import jax
import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config, check
from specrl_jax.distill import programs, schedule
from specrl_jax.distill.data import Plan, batch_of, in_rows, of_rollout
from specrl_jax.distill.programs import EVALUATE, FROZEN, ROWS, TARGETS, UPDATE, Batch
from specrl_jax.distill.teacher import FrozenParams
from specrl_jax.distill.update import Programs, UpdateResult
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.structs import DrafterParams, Json, Metrics, PyTree, Rollout

PICK, DRAW, WATCH = range(3)  # uses of random numbers


class OnlineDistillation:
    """The feature buffer and the updates of the sampler's trainable drafter.

    Raises:
      ConfigError: options that cannot work together.
    """

    def __init__(self, config: Config, sampler: Sampler) -> None:
        options, mesh = config.distill, sampler.mesh
        self.options, self._seed, self._sampler = options, config.seed, sampler
        self._temperature = config.rollout.temperature
        shards = sharding.shard_count(mesh)
        check(options.micro_batch % shards == 0, "distill.micro_batch", options.micro_batch,
              f"must be a multiple of the {shards} data shards")
        check(not options.overlap or mesh.size == 1, "distill.overlap", options.overlap,
              f"two programs at once over {mesh.size} devices may wait for each other; use False")
        place, arch = sampler.drafters.trainable or 0, sampler.engine.decoder.arch
        drafter = sampler.drafters.parts[place].trainable
        assert drafter is not None
        check(options.when != "trigger" or drafter.outputs is not None, "distill.when",
              options.when, "needs a trainable drafter with outputs and logits; choose interval")
        self._programs = Programs(drafter, arch, options, mesh, sharding.replicated(mesh))
        self.buffer, self._sizes = programs.make_buffer(config, drafter, arch.hidden_size)
        self._vocab = sampler.drafter_weights[place]["vocab"]
        self.staleness = schedule.forget()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)  # of overlapped updates
        self._running: concurrent.futures.Future[UpdateResult] | None = None

    def init(self, params: DrafterParams) -> LearnerState:
        """Returns the state before the first update."""
        return self._programs.init(params)

    def compile(self, say: Callable[[str], None], state: LearnerState) -> None:
        """Compiles whatever a step may run; nothing is learned from it."""
        say("compiling the drafter's update")
        self._compiled = {p.name: p.lower().compile() for p in programs.programs(
            self._programs, self.options, self._sizes, self.buffer.heads, state,
            self._sampler.params, self._vocab)}

    def put(self, batch: Batch) -> Batch:
        """Puts a host batch on the devices, the rows over data shards."""
        return sharding.put(programs.places(self._programs.mesh), batch)

    def _rng(self, step: int, use: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, len(prng.STREAMS), step, use])

    def store(self, rollout: Rollout, reward: np.ndarray, advantage: np.ndarray, step: int) -> None:
        """Stores features of a rollout, computed with the published policy that generated it."""
        order = self._rng(step, PICK).permutation(len(rollout.length))
        sizes = self._sizes
        plan = Plan(in_rows(np.sort(order[: sizes.sequences]), self.options.micro_batch),
                    sizes.columns, sizes.window)
        batch = batch_of(of_rollout(rollout, reward, advantage), plan, self._temperature)
        actor = self._sampler.params
        targets = self._compiled[TARGETS](actor, self._programs.rows(batch))
        self.buffer.add(batch, jax.tree.map(np.asarray, targets), self._sampler.version,
                        np.asarray(self._compiled[ROWS](actor, self._vocab)))

    def measure_staleness(self, params: DrafterParams, step: int) -> Metrics:
        """Measures acceptance of first drafts on the newest rollout, and what entropy explains."""
        batch, targets = self.buffer.draw(self._rng(step, WATCH), self.options.batch,
                                          self.options.micro_batch, newest=True)
        noise = self._programs.rows(programs.no_noise(*batch.length.shape))
        found = self._compiled[EVALUATE](params, self._frozen_params(),
                                         *self.put((batch, targets)), *noise)
        live = np.asarray(found.live)[:, 0]
        acceptance, entropy = np.asarray(found.alpha)[:, 0][live], targets.entropy[live]
        self.staleness, unexplained = schedule.observe(self.staleness, acceptance, entropy)
        return {"distill/acceptance": float(acceptance.mean()), "distill/unexplained": unexplained,
                "distill/entropy": float(entropy.mean()),
                "distill/fall": float(self.staleness.fall)}

    def _frozen_params(self) -> FrozenParams:
        return self._compiled[FROZEN](self._sampler.params, self._vocab,
                                      sharding.put(programs.teachers_place(
                                          self._programs.mesh, self.buffer.heads),
                                          self.buffer.heads))

    def run(self, state: LearnerState, step: int) -> UpdateResult:
        return self.train_on(state, self._frozen_params(), self._draw(step))

    def start(self, state: LearnerState, step: int) -> None:
        """Starts the same updates in a thread; it reads copies only."""
        self._running = self._thread.submit(self.train_on, state, self._frozen_params(),
                                            self._draw(step))

    def take_result(self) -> UpdateResult | None:
        """Waits for the updates that were started; None if there are none."""
        result, self._running = self._result(), None
        return result

    def _result(self) -> UpdateResult | None:
        return self._running.result() if self._running else None

    def _draw(self, step: int) -> list[Batch]:
        rng, options = self._rng(step, DRAW), self.options
        return [self.buffer.draw(rng, options.batch, options.micro_batch)
                for _ in range(options.updates)]

    def train_on(self, state: LearnerState, frozen: FrozenParams, batches: list[Batch]
                 ) -> UpdateResult:
        """Updates on host batches; touches nothing but its arguments."""
        began, updates = time.perf_counter(), []
        for batch in batches:
            state, metrics = self._compiled[UPDATE](state, frozen, *self.put(batch))
            updates.append({name: np.asarray(value).tolist() for name, value in metrics.items()})
        return UpdateResult(state, updates, time.perf_counter() - began)

    def arrays(self, state: LearnerState) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint; waits for running updates.

        `state` stands in for the result of overlapped updates if there is none.
        """
        held = {"drafter_features": self.buffer.arrays(), "drafter_staleness": self.staleness}
        if not self.options.overlap:
            return held
        result = self._result()
        ahead = result.state if result else state
        return held | {"drafter_ahead": {"weights": ahead.params, "optimizer": ahead.optimizer}}

    def meta(self) -> Json:
        result = self._result()
        return {"ahead": result.metrics if result else None}

    def restore(self, arrays: dict[str, PyTree], meta: Json) -> None:
        self.buffer.restore(arrays["drafter_features"])
        self.staleness = jax.tree.map(np.asarray, arrays["drafter_staleness"])
        if meta["ahead"] is not None:
            ahead = arrays["drafter_ahead"]
            state = LearnerState(ahead["weights"], ahead["optimizer"])
            self._running = self._thread.submit(UpdateResult, state, meta["ahead"], 0.0)
