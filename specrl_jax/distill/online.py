"""Training of a drafter while RL runs: features of rollouts in, optimiser updates out.

The actor's update sees nothing of it: features come from a forward of their own over the finished
rollout, under the weights that generated it; parameters, optimiser and gradient norm are the
drafter's own. `distill/drafter.py` decides what becomes of the updated weights.
"""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import prng, sharding
from specrl_jax.config import Config, check
from specrl_jax.distill import schedule, teacher
from specrl_jax.distill.data import Plan, batch_of, in_rows, of_rollout
from specrl_jax.distill.features import FeatureBuffer
from specrl_jax.distill.teacher import FrozenParams, SequenceBatch, TeacherTargets
from specrl_jax.distill.update import Programs, UpdateResult, init_state
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.structs import DrafterParams, Json, Metrics, PyTree, Rollout

Batch = tuple[SequenceBatch, TeacherTargets]
PICK, DRAW, WATCH = range(3)  # uses of random numbers


class OnlineDistillation:
    """The feature buffer and the updates of the sampler's trainable drafter.

    Raises:
      ConfigError: options that cannot work together.
    """

    def __init__(self, config: Config, sampler: Sampler) -> None:
        options, mesh = config.distill, sampler.mesh
        self.options, self._seed, self._sampler = options, config.seed, sampler
        self._temperature, self._window = config.rollout.temperature, config.rollout.max_new_tokens
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
        sequences = min(options.sequences or config.sequences, config.sequences)
        self._columns = config.rollout.max_prompt_tokens + self._window
        self.buffer = FeatureBuffer(
            options, drafter, arch.hidden_size, sequences, self._columns, self._window,
            heads=1 if options.when == "once" else options.rollouts)
        self._sequences = min(sequences, self.buffer.rows)
        self._vocab = sampler.drafter_weights[place]["vocab"]
        self.staleness = schedule.forget()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)  # of overlapped updates
        self._running: concurrent.futures.Future[UpdateResult] | None = None

    def init(self, params: DrafterParams) -> LearnerState:
        """Returns the state before the first update."""
        return self._programs.replicate(init_state(self.options, params))

    def compile(self, say: Callable[[str], None], state: LearnerState) -> None:
        """Compiles whatever a step may run; nothing is learned from it."""
        say("compiling the drafter's update")
        programs, actor, options = self._programs, self._sampler.params, self.options
        heads = programs.replicate(self.buffer.heads)
        self._frozen = jax.jit(_frozen_params, static_argnums=(0, 4)).lower(
            programs.arch, actor, self._vocab, heads, options.overlap).compile()
        self._rows = jax.jit(teacher.draft_rows, static_argnums=0).lower(
            programs.arch, actor, self._vocab).compile()
        n, b = options.batch // options.micro_batch, options.micro_batch
        blank = programs.rows(_blank(-(-self._sequences // b), b, self._columns))
        self._compute_targets = programs.compute_targets.lower(self._window, actor, blank).compile()
        found = jax.tree.map(np.asarray, self._compute_targets(actor, blank))
        targets = jax.tree.map(lambda a: np.resize(a, (n, *a.shape[1:])), found)
        batch = self.put((_blank(n, b, self._columns), targets))
        frozen = self._frozen_params()
        self._update = programs.update.lower(state, frozen, *batch).compile()
        if options.when == "trigger":
            self._evaluate = programs.evaluate.lower(
                state.params, frozen, *batch, *self._no_noise(n, b)).compile()

    def put(self, batch: Batch) -> Batch:
        """Puts a host batch on the devices, the rows over data shards."""
        mesh = self._programs.mesh
        rows, tall = (NamedSharding(mesh, P(*axes, sharding.ROWS)) for axes in ([None], [None] * 2))
        return sharding.put((rows, TeacherTargets(
            taps=tall, hidden=tall, normalizer=rows, best=rows, entropy=rows,
            teacher=sharding.replicated(mesh))), batch)

    def _no_noise(self, n: int, b: int) -> tuple[PyTree, PyTree]:
        """Returns keys and scale for `evaluate`, whose draws are not read."""
        return self._programs.rows((np.zeros((n, b, 2), np.uint32), np.zeros((n, b), np.float32)))

    def _rng(self, step: int, use: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, len(prng.STREAMS), step, use])

    def store(self, rollout: Rollout, reward: np.ndarray, advantage: np.ndarray, step: int) -> None:
        """Stores features of a rollout, computed with the published policy that generated it."""
        order = self._rng(step, PICK).permutation(len(rollout.length))
        plan = Plan(in_rows(np.sort(order[: self._sequences]), self.options.micro_batch),
                    self._columns, self._window)
        batch = batch_of(of_rollout(rollout, reward, advantage), plan, self._temperature)
        actor = self._sampler.params
        targets = self._compute_targets(actor, self._programs.rows(batch))
        self.buffer.add(batch, jax.tree.map(np.asarray, targets), self._sampler.version,
                        np.asarray(self._rows(actor, self._vocab)))

    def measure_staleness(self, params: DrafterParams, step: int) -> Metrics:
        """Measures acceptance of first drafts on the newest rollout, and what entropy explains."""
        batch, targets = self.buffer.draw(self._rng(step, WATCH), self.options.batch,
                                          self.options.micro_batch, newest=True)
        found = self._evaluate(params, self._frozen_params(), *self.put((batch, targets)),
                               *self._no_noise(*batch.length.shape))
        live = np.asarray(found.live)[:, 0]
        acceptance, entropy = np.asarray(found.alpha)[:, 0][live], targets.entropy[live]
        self.staleness, unexplained = schedule.observe(self.staleness, acceptance, entropy,
                                                       self.options.ema_decay)
        return {"distill/acceptance": float(acceptance.mean()), "distill/unexplained": unexplained,
                "distill/entropy": float(entropy.mean()),
                "distill/fall": float(self.staleness.fall)}

    def _frozen_params(self) -> FrozenParams:
        return self._frozen(self._sampler.params, self._vocab,
                            self._programs.replicate(self.buffer.heads))

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
            state, metrics = self._update(state, frozen, *self.put(batch))
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


def _frozen_params(arch: Any, actor: Any, vocab: Any, teachers: Any, copy: bool) -> FrozenParams:
    """Returns what updates read of the actor; with `copy` it survives the actor's buffers."""
    frozen = teacher.frozen_params(arch, actor, vocab).replace(teachers=teachers)
    return frozen.replace(embed=jnp.copy(frozen.embed), head=jnp.copy(frozen.head)
                          ) if copy else frozen


def _blank(n: int, b: int, columns: int) -> SequenceBatch:
    """Returns micro-batches of padding."""
    zero, none = np.zeros((n, b), np.int32), np.zeros((n, b), np.float32)
    return SequenceBatch(tokens=np.zeros((n, b, columns), np.int32), length=zero, first=zero + 1,
                         temperature=none + 1, reward=none, advantage=none)
