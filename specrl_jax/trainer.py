"""The RL step: generate, score, learn, publish.

`Trainer.step` is on-policy policy gradient on groups of responses to the same prompts:

1. The drafter is verified; a broken one is repaired or switched off.
2. The published policy generates `group_size` responses to each prompt, speculatively. The noise of
   each token is a function of indices, so that drafts, batch and restarts change no token.
3. Responses are decoded and rewarded; advantages are relative to their group.
4. The drafter stores features of the rollout while the policy that generated it is published.
5. The policy is updated on the whole rollout, in `rl.minibatches` optimiser steps, and published.
6. The drafter is updated and published if that is due.

What is left out: no value model, no replay of old rollouts, no asynchronous generation. A reference
policy is kept only for a KL penalty.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.distill import drafter
from specrl_jax.draft.response_cache import ResponseCache, capacity
from specrl_jax.io import data, launches
from specrl_jax.io.compilation import Compiler
from specrl_jax.io.machine import peak_rss
from specrl_jax.model import architecture, layers, weights
from specrl_jax.model.transformer import Params
from specrl_jax.rl import algorithm, learner
from specrl_jax.rl.batch import Batch, Totals, layout_of, make_batch, part_of
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rl.reward import compose
from specrl_jax.rollout.metrics import rollout_metrics
from specrl_jax.rollout.prompts import PromptBatch, Prompts, make_prompts
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.scoring import Sample, score_rollout
from specrl_jax.structs import Array, Json, Metrics, PyTree, Rollout

GAPS = ("logprob_gap", "logprob_gap_max", "logprob_gap_tokens")  # under the weights that acted


class CheckpointReader(Protocol):
    """What `Trainer.restore` reads; io.checkpoint.Checkpoints is one."""

    def restore_latest(self, abstract: dict[str, PyTree]
                       ) -> tuple[int, dict[str, PyTree], Json] | None:
        """Returns (step, arrays like `abstract`, meta), None if there is no checkpoint."""
        ...


class StepTimer:
    """Seconds of a step by phase: `with timer("rollout"): ...`. Phases of one name add up."""

    def __init__(self, phase: Callable[[str], None] = lambda name: None) -> None:
        """Args: phase, called with the name of each phase when it begins."""
        self._phase, self._began = phase, time.perf_counter()
        self._seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._phase(name)
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    @property
    def total(self) -> float:
        """Seconds since the timer was made."""
        return time.perf_counter() - self._began


class Trainer:
    """The state and programs of a run, without its files: `run.train` adds them."""

    def __init__(self, config: Config, source: weights.Source, prompts: Prompts,
                 say: Callable[[str], None]) -> None:
        self.config, self.prompts, self.tokenizer = config, prompts, source.tokenizer
        self.reward = compose(config.reward.terms, config.reward.weights)
        self.algorithm = algorithm.resolve(config.rl)
        self.mesh = sharding.make_mesh(config.mesh)
        self.arch, self.step_number, self.bad_steps = source.arch, 0, 0
        scanned = layers.are_scanned(sharding.platform(self.mesh))
        described = architecture.describe(self.arch, scanned)
        for axis in sorted(sharding.replicated_axes(described, sharding.LEARNER_RULES, self.mesh,
                                                    architecture.is_param)):
            say(f"replicated, because the mesh does not divide it: {axis}")
        self.shardings = sharding.shardings(described, sharding.LEARNER_RULES, self.mesh,
                                         architecture.is_param)
        say(f"loading {source.source}")
        params = sharding.put(self.shardings, layers.arrange(source.params(), scanned))
        self.reference = jax.tree.map(jnp.copy, params) if config.rl.kl else None
        self.optimizer = learner.make_optimizer(config.learner)
        self.state = LearnerState(params, jax.jit(
            self.optimizer.init, out_shardings=self._optimizer_places(params))(params))
        self.sampler = Sampler(config, self.arch, self.tokenizer.stop_ids, self.mesh,
                               prompts=config.prompts_per_step, group=config.group_size, warn=say,
                               tokenizer=self.tokenizer)
        self.sampler.publish(params, 0)
        self._programs: dict[str, Any] = {}
        self.warnings: list[str] = []  # about the drafter, not shown yet
        self.drafter = drafter.make(config, self.sampler, prompts.tokens, self._sample,
                                    self.warnings.append)
        spec, buffer = config.spec, config.rollout.max_new_tokens
        most = spec.history_past or 1
        rows = capacity(spec.history_megabytes, buffer, len(prompts.examples), most)
        self.responses = ResponseCache(rows, buffer, most, spec.history_window)

    @classmethod
    def from_config(cls, config: Config, say: Callable[[str], None] = lambda text: None
                    ) -> "Trainer":
        """Returns the trainer of the model and the data that `config` names.

        Raises:
          ConfigError: there is no such model or data, or a value cannot work.
        """
        source = weights.describe_source(config.model.path, family=config.model.family)
        return cls(config, source, make_prompts(config, source.tokenizer, say), say)

    def _optimizer_places(self, params: Params) -> PyTree:
        """Returns shardings: AdamW's moments like their parameters, everything else replicated."""
        shapes = jax.eval_shape(self.optimizer.init, params)
        like = jax.tree.structure(params)

        def place(node: PyTree) -> PyTree:
            if jax.tree.structure(node) == like:
                return self.shardings
            return sharding.replicated(self.mesh)

        return jax.tree.map(place, shapes, is_leaf=lambda n: jax.tree.structure(n) == like)

    # Programs.

    def compile(self, say: Callable[[str], None]) -> None:
        """Compiles every program that a step may run."""
        self.sampler.compile(say, others=self._add_programs)
        self._programs = {name: future.result() for name, future in self._programs.items()}
        self.sampler.checksum  # noqa: B018  compiles it
        self.drafter.compile(say)

    def _add_programs(self, compiler: Compiler) -> None:
        """Starts compiling the policy's programs: update, scores, gap, as far as they are used."""
        config = self.config
        (batch, totals), *_ = self._minibatches(
            self._blank_rollout(), np.zeros(config.sequences, np.float32))
        params, scores = self.state.params, batch.rollout_logprob
        replicated = sharding.replicated(self.mesh)
        on_mesh = functools.partial(sharding.traced_for, self.mesh)
        if not config.rl.updates:
            gap = jax.jit(on_mesh(functools.partial(learner.first_gap, self.arch, config)),
                          out_shardings=replicated)
            self._programs["gap"] = compiler.add(gap.lower(params, batch))
            return
        if self._needs_scores:
            score = jax.jit(on_mesh(functools.partial(learner.score, self.arch, config)))
            self._programs["score"] = compiler.add(score.lower(params, batch, totals))
        shardings = jax.tree.map(lambda a: a.sharding, self.state)
        update = jax.jit(on_mesh(functools.partial(learner.update, self.arch, config)),
                         donate_argnums=(0,), out_shardings=(shardings, replicated))
        self._programs["update"] = compiler.add(update.lower(
            self.state, batch, totals, scores if self._reads_old else None,
            scores if config.rl.kl else None))

    @property
    def _reads_old(self) -> bool:
        return self._steps_on_rollout > 1 or self.config.learner.old_logprob == "rollout"

    @property
    def _needs_scores(self) -> bool:
        kl, old = self.config.rl.kl, self.config.learner.old_logprob
        return bool(kl) or (self._steps_on_rollout > 1 and old == "learner")

    @property
    def _steps_on_rollout(self) -> int:
        """Optimiser steps on each rollout; only the first one's ratios are 1."""
        return self.config.rl.updates * self.config.rl.minibatches

    def _blank_rollout(self) -> Rollout:
        q, r = self.config.sequences, self.config.rollout
        ints, floats = np.zeros((q, r.max_new_tokens), np.int32), np.zeros(
            (q, r.max_new_tokens), np.float32)
        one = np.ones(q, np.int32)
        return Rollout(
            prompt=np.zeros((q, r.max_prompt_tokens), np.int32), prompt_length=one, tokens=ints,
            length=one, logprob=floats, raw_logprob=floats, top_p_mass=floats, prompt_id=one,
            occurrence=one, sample_id=one, stopped=one > 0, commits=ints, rounds=one)

    def _minibatches(self, rollout: Rollout, advantage: np.ndarray, keep_all: bool = False
                     ) -> list[tuple[Batch, Totals]]:
        """Returns the batch of each optimiser step over the rollout, on the devices."""
        config, parts = self.config, self.config.rl.minibatches
        keep_all = keep_all or bool(config.rl.kl) or config.rl.updates > 1
        rows = NamedSharding(self.mesh, P(None, sharding.ROWS))
        places = (rows, sharding.replicated(self.mesh))
        return [sharding.put(places, make_batch(
            part_of(rollout, i, parts), part, config.rollout.temperature, layout_of(config),
            keep_all)) for i, part in enumerate(np.split(advantage, parts))]

    # The step.

    def step(self, progress: Callable[[int, int, int], None] = lambda *counts: None,
             phase: Callable[[str], None] = lambda name: None) -> tuple[Metrics, list[Sample]]:
        """Runs one RL step; returns its metrics and a sample of each sequence."""
        timer, step = StepTimer(phase), self.step_number
        metrics: Metrics = {"step": step, "checksum/policy": self.sampler.checksum}
        with timer("drafter"):
            metrics |= self.drafter.before_rollout(step)
        with timer("rollout"):
            rollout, rollout_metrics = self.rollout(progress)
        with timer("reward"):
            samples, rewards, terms = self.score(rollout)
            advantage = self._advantages(rewards)
        with timer("drafter"):
            metrics |= self.drafter.collect(rollout, rewards, advantage, step)
        with timer("learn"):
            metrics |= rollout_metrics | terms | self.learn(rollout, advantage)
        with timer("drafter"):
            metrics |= self.drafter.after_update(step)
        metrics |= self.drafter.account(timer["drafter"], metrics.get("time/saved", 0.0))
        groups = advantage.reshape(-1, self.config.group_size)
        metrics |= {
            "reward/mean": float(rewards.mean()), "reward/std": float(rewards.std()),
            "reward/nonzero_advantage_fraction": float((groups != 0).any(1).mean()),
            "time/reward": timer["reward"], "time/learn": timer["learn"],
            "time/step": timer.total, "memory/peak_bytes": peak_rss()}
        self.step_number += 1
        return metrics, samples

    def rollout(self, progress: Callable[[int, int, int], None] = lambda *counts: None
                ) -> tuple[Rollout, Metrics]:
        """Generates the sequences of this step; returns them and the rollout's metrics."""
        batch = self._prompts(self.step_number)
        past = self.responses.past(batch.prompt_id, self.sampler.engine.layout.past,
                                   self.step_number)
        rollout, result = self.sampler.generate(batch, "train", self.step_number, past=past,
                                                progress=progress)
        if self.config.spec.history_past:
            self.responses.add(rollout.prompt_id, rollout.tokens, rollout.length, self.step_number)
        saved = launches.saved(result.trace, self.sampler.plain_round_seconds)
        return rollout, rollout_metrics(rollout, result) | saved | {
            "version/policy": rollout.policy_version, "version/drafter": rollout.drafter_version}

    def _sample(self, number: int) -> tuple[Rollout, np.ndarray, np.ndarray]:
        """Generates the prompts of a step outside RL; see distill.drafter.Sample."""
        rollout, _ = self.sampler.generate(self._prompts(number), "generate", number)
        rewards = self.score(rollout)[1]
        return rollout, rewards, self._advantages(rewards)

    def score(self, rollout: Rollout) -> tuple[list[Sample], np.ndarray, Metrics]:
        """Returns samples, rewards f32[Q], and the mean of each term of the reward as metrics."""
        samples, rewards, terms = score_rollout(rollout, self.prompts, self.tokenizer, self.reward)
        return samples, rewards, {f"reward/{name}": value for name, value in terms.items()}

    def _advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Returns f32[Q], relative to each group."""
        groups = rewards.reshape(-1, self.config.group_size)
        return self.algorithm.advantage(groups).reshape(-1)

    def _prompts(self, step: int) -> PromptBatch:
        """Returns a step's prompts, a function of seed and step."""
        return self.prompts.batch(data.step_prompts(
            len(self.prompts.tokens), self.config.seed, step, self.config.prompts_per_step))

    def learn(self, rollout: Rollout, advantage: np.ndarray) -> Metrics:
        """Updates the policy on one rollout and publishes it.

        With rl.updates = 0 the loss is 0, an empty sum, and the gap is that of the first
        micro-batch in canonical order.
        """
        metrics = (self._update_policy if self.config.rl.updates else self._measure_gap)(
            rollout, advantage)
        self.bad_steps = 0 if metrics["applied"] else self.bad_steps + 1
        self.sampler.publish(self.state.params, self.step_number + 1)
        return metrics | {f"rollout/{name}": metrics.pop(name) for name in GAPS}

    def _measure_gap(self, rollout: Rollout, advantage: np.ndarray) -> dict[str, float]:
        (batch, _), *_ = self._minibatches(rollout, advantage, keep_all=True)
        gap = jax.device_get(self._programs["gap"](self.state.params, batch))
        return jax.tree.map(float, gap) | {"applied": 1.0, "loss": 0.0}

    def _update_policy(self, rollout: Rollout, advantage: np.ndarray) -> dict[str, float]:
        """Runs rl.updates epochs of rl.minibatches optimiser steps.

        Returns metrics: means over the last epoch's steps; `applied` 0 if any step was skipped; the
        gap of the first step, which alone sees the weights that acted.
        """
        parts = self._minibatches(rollout, advantage)
        old, reference = self._old_scores(parts), [None] * len(parts)
        if self.config.rl.kl:
            reference = [self._programs["score"](self.reference, *part) for part in parts]
        update, steps = self._programs["update"], []
        for _ in range(self.config.rl.updates):
            for part in zip(parts, old, reference, strict=True):
                (batch, totals), *scores = part
                self.state, metrics = update(self.state, batch, totals, *scores)
                steps.append(jax.tree.map(float, jax.device_get(metrics)))
        last = steps[-len(parts) :]
        means = {name: float(np.mean([step[name] for step in last])) for name in last[0]}
        return means | {name: steps[0][name] for name in GAPS} | {
            "applied": min(step["applied"] for step in steps)}

    def _old_scores(self, parts: list[tuple[Batch, Totals]]) -> list[Array | None]:
        """Returns the log-probabilities of the policy that acted, of each part; None if the update
        computes them itself."""
        if not self._reads_old:
            return [None] * len(parts)
        if self.config.learner.old_logprob == "rollout":
            return [batch.rollout_logprob for batch, _ in parts]
        return [self._programs["score"](self.state.params, *part) for part in parts]

    # Persistence.

    def arrays(self) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint."""
        return {"actor": self.state.params, "optimizer": self.state.optimizer,
                "history": self.responses.arrays(),
                "control": jax.tree.map(np.asarray, self.sampler.engine.control),
                "acceptance": self.sampler.engine.acceptance, **self.drafter.arrays()}

    def meta(self) -> Json:
        """Returns what else a checkpoint holds, as JSON values."""
        return {"step": self.step_number, "seed": self.config.seed, "bad_steps": self.bad_steps,
                "drafter": self.drafter.meta()}

    def restore(self, checkpoints: CheckpointReader) -> bool:
        """Continues from the newest intact checkpoint; returns whether there is one."""
        abstract = jax.tree.map(
            lambda a: a if isinstance(a, np.ndarray) else jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=a.sharding), self.arrays())
        found = checkpoints.restore_latest(abstract)
        if found is None:
            return False
        _, arrays, meta = found
        self.state = LearnerState(arrays["actor"], arrays["optimizer"])
        self.responses.restore(arrays["history"])
        self.sampler.engine.control = arrays["control"]
        self.sampler.engine.acceptance = jax.tree.map(np.asarray, arrays["acceptance"])
        self.step_number, self.bad_steps = meta["step"], meta["bad_steps"]
        self.sampler.control_restored = True
        self.sampler.publish(self.state.params, self.step_number)
        self.drafter.restore(arrays, meta["drafter"])
        return True
