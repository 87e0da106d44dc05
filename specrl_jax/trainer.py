"""The RL step: generate, score, learn, publish.

`Trainer.step` is on-policy policy gradient on groups of responses to the same prompts:

1. The drafter is verified; a broken one is repaired or switched off.
2. The published policy generates `group_size` responses to each prompt, speculatively. The noise of
   each token is a function of indices, so that drafts, batch and restarts change no token.
3. Responses are decoded and rewarded; further prompts may replace groups without an advantage.
4. The drafter stores features of the rollout while the policy that generated it is published.
5. The policy is updated on the whole rollout, in `rl.minibatches` optimiser steps, and published.
6. The drafter is updated and published if that is due.

What is left out: no value model, no replay of old rollouts, no asynchronous generation. A reference
policy is kept only for a KL penalty.
"""

import functools
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import sharding
from specrl_jax.checkpoint.checkpoints import CheckpointReader
from specrl_jax.config import Config
from specrl_jax.config.tasks import RewardError
from specrl_jax.data.prompt_order import PromptOrder, step_prompts
from specrl_jax.data.prompts import Prompts, make_prompts
from specrl_jax.distill import drafter
from specrl_jax.draft.response_cache import MEGABYTES, ResponseCache, capacity
from specrl_jax.model import architecture, layers, lora, weights
from specrl_jax.rewards import judge
from specrl_jax.rewards.scoring import Sample, score_rollout
from specrl_jax.rl import algorithm, experience, learner, overlong, programs, teacher
from specrl_jax.rl.batch import Batch, Totals
from specrl_jax.rl.experience import Scored, join
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rl.optimizer import make_optimizer
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.metrics import rollout_metrics
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.runtime.compilation import Compiler, Name, abstract
from specrl_jax.runtime.machine import peak_rss
from specrl_jax.runtime.step_timer import StepTimer
from specrl_jax.structs import Array, Json, Metrics, ModelParams, PyTree, Rollout


class Trainer:
    """The state and programs of a run, without its files: `run.train` adds them."""

    def __init__(self, config: Config, source: weights.Source, prompts: Prompts,
                 say: Callable[[str], None]) -> None:
        self.config, self.prompts, self.tokenizer = config, prompts, source.tokenizer
        self.warnings: list[str] = []  # not shown yet
        self.reward = judge.of_config(config.reward, self.warnings.append)
        judge.check_answers(config.reward.terms, prompts.examples)
        algorithm.check_training(config, say)
        self.algorithm = algorithm.resolve(config.rl)
        self.order = PromptOrder(config, len(prompts.tokens))
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
        loaded = source.params(self.shardings)
        self.base, params = programs.initial(config, self.arch, self.mesh, loaded)
        self.teacher = teacher.load(config, self.tokenizer, self.mesh, say)
        self._frozen = {} if self.base is None and not config.rl.kl else {
            "base": layers.identity(loaded)}
        self._frozen |= {"teacher": layers.identity(self.teacher.params)} if self.teacher else {}
        self.reference = jax.tree.map(jnp.copy, params) if config.rl.kl else None
        places = jax.tree.map(lambda a: a.sharding, programs.abstract_state(
            config, self.arch, self.mesh).optimizer)
        self.optimizer = make_optimizer(config.learner)
        self.state = LearnerState(params, jax.jit(
            self.optimizer.init, out_shardings=places)(params))
        self.sampler = Sampler(config, self.arch, self.tokenizer.stop_ids, self.mesh,
                               prompts=config.prompts_per_step, group=config.responses,
                               greedy=config.rl.greedy, warn=say, tokenizer=self.tokenizer)
        self.sampler.publish(params if self.base is None else self.base, 0)
        self._programs: dict[Name, Any] = {}
        self.drafter = drafter.make(config, self.sampler, prompts.tokens, self._sample,
                                    self.warnings.append)
        spec, buffer = config.spec, config.rollout.max_new_tokens
        most = spec.history_past or 1
        rows = capacity(MEGABYTES, buffer, len(prompts.examples), most)
        self.responses = ResponseCache(rows, buffer, most)

    @classmethod
    def from_config(cls, config: Config, say: Callable[[str], None] = lambda text: None
                    ) -> "Trainer":
        """Returns the trainer of the model and the data that `config` names.

        Raises:
          ConfigError: there is no such model or data, or a value cannot work.
        """
        source = weights.describe_source(config.model.path, family=config.model.family)
        return cls(config, source, make_prompts(config, source.tokenizer, say), say)

    # Programs.

    def compile(self, say: Callable[[str], None]) -> None:
        """Compiles every program that a step may run."""
        self.sampler.compile(say, others=self._add_programs)
        self._programs = {name: future.result() for name, future in self._programs.items()}
        self.sampler.checksum  # noqa: B018  compiles it
        self.drafter.compile(say)

    def _add_programs(self, compiler: Compiler) -> None:
        """Starts compiling the policy's programs."""
        self._programs = {p.name: compiler.add(p)
                          for p in programs.programs(self.config, self.arch, self.mesh,
                                                    self.teacher and self.teacher.arch)}

    def _minibatches(self, rollout: Rollout, advantage: np.ndarray
                     ) -> list[tuple[Batch, Totals]]:
        """Returns the batch of each optimiser step over the rollout, on the devices."""
        places = programs.batch_places(self.mesh)
        return [sharding.put(places, part)
                for part in programs.host_batches(self.config, rollout, advantage)]

    # The step.

    def step(self, progress: Callable[[int, int, int], None] = lambda *counts: None,
             phase: Callable[[str], None] = lambda name: None) -> tuple[Metrics, list[Sample]]:
        """Runs one RL step, after compiling if need be; returns metrics and what samples.jsonl
        holds of the step.

        Raises:
          RewardError: a reward failed; the state is still that of before the step.
        """
        if not self._programs:
            self.compile(lambda text: None)
        timer, step = StepTimer(phase), self.step_number
        metrics: Metrics = {"step": step, "checksum/policy": self.sampler.checksum}
        with timer("drafter"):
            metrics |= self.drafter.before_rollout(step)
        rollout, rewards, advantage, samples, found = self._gather(progress, timer)
        with timer("drafter"):
            metrics |= self.drafter.collect(rollout, rewards, advantage, step)
        with timer("learn"):
            metrics |= found | self.learn(*overlong.counted(self.config, rollout, advantage))
        with timer("drafter"):
            metrics |= self.drafter.after_update(step)
        metrics |= self.drafter.account(timer["drafter"], metrics.get("time/saved", 0.0))
        metrics |= {
            "time/reward": timer["reward"], "time/learn": timer["learn"],
            "time/step": timer.total, "memory/peak_bytes": peak_rss()}
        self.step_number += 1
        return metrics, samples

    def rollout(self, progress: Callable[[int, int, int], None] = lambda *counts: None
                ) -> tuple[Rollout, Metrics]:
        """Generates the sequences of this step; returns them and the rollout's metrics."""
        rollout, result = self._generate(progress, 0)
        return rollout, rollout_metrics(rollout, [result], self.sampler.plain_round_seconds)

    def _generate(self, progress: Callable[[int, int, int], None], earlier: int
                  ) -> tuple[Rollout, Result]:
        """Generates this step's next prompts, after `earlier` rollouts of the step."""
        per_step, step = self.config.prompts_per_step, self.step_number
        places = self.order.places(step, (earlier + 1) * per_step)
        batch = self.prompts.batch(places).part(slice(-per_step, None))
        past = self.responses.past(batch.prompt_id, self.sampler.engine.layout.past, step)
        return self.sampler.generate(batch, "train", step, past=past, progress=progress)

    def _gather(self, progress: Callable[[int, int, int], None], timer: StepTimer
                ) -> tuple[Rollout, np.ndarray, np.ndarray, list[Sample], Metrics]:
        """Generates and scores the step's prompts, and further ones as rl.filter asks; returns
        what the step learns from (rollout, rewards and advantages f32[Q]), samples, metrics."""
        config, engine = self.config, self.sampler.engine
        before = engine.control, engine.acceptance
        generated, scored = [], []
        while len(scored) < config.rl.most_rollouts and (
                sum(one.useful for one in scored) < config.prompts_per_step):
            with timer("rollout"):
                generated.append(self._generate(progress, len(scored)))
            with timer("reward"):
                try:
                    scored.append(self._scored(generated[-1][0]))
                except RewardError:
                    engine.control, engine.acceptance = before
                    raise
        rollouts, results = zip(*generated, strict=True)
        whole = join(rollouts)
        if config.spec.history_past:
            self.responses.add(whole.prompt_id, whole.tokens, whole.length, self.step_number)
        places = self.order.places(self.step_number, len(scored) * config.prompts_per_step)
        chosen, metrics = experience.merge(scored, config, self.prompts.batch(places).keys())
        self.order.observe(*experience.rates(scored, self.prompts.place))
        advantage = self._advantages(chosen.shaped, chosen.baseline)
        samples = chosen.samples + chosen.unlearned
        return chosen.rollout, chosen.rewards, advantage, samples, metrics | rollout_metrics(
            whole, results, self.sampler.plain_round_seconds)

    def _scored(self, rollout: Rollout) -> Scored:
        """Rewards a rollout; see Scored."""
        config, (mine, greedy) = self.config, experience.split(self.config, rollout)
        samples, rewards, terms = self.score(mine)
        shaped, more = experience.shaped(config, mine, rewards, self._sequence_kl)
        unlearned, baselines = [], (None, None)
        if greedy is not None:
            answers, best, others = self.score(greedy)
            unlearned = experience.failing(answers)
            terms["reward/failures"] += others["reward/failures"]
            baselines = best, experience.shaped(config, greedy, best, self._sequence_kl)[0]
        _, useful = overlong.counted(config, mine, self._advantages(rewards, baselines[0]))
        return Scored(mine, samples, unlearned, rewards, shaped, baselines[1], terms | more, useful)

    def _sequence_kl(self, rollout: Rollout) -> np.ndarray:
        return programs.sequence_kl(self.config, self.mesh, rollout, self._programs["kl"], [
            functools.partial(self._score, p) for p in (self.state.params, self.reference)])

    def _sample(self, number: int) -> tuple[Rollout, np.ndarray, np.ndarray]:
        """Generates the prompts of a step outside RL; see distill.drafter.Sample."""
        places = step_prompts(len(self.prompts.tokens), self.config.seed, number,
                                   self.config.prompts_per_step)
        rollout, _ = self.sampler.generate(self.prompts.batch(places), "generate", number)
        found = self._scored(rollout)
        return found.rollout, found.rewards, self._advantages(found.shaped, found.baseline)

    def _advantages(self, rewards: np.ndarray, baseline: np.ndarray | None) -> np.ndarray:
        return self.algorithm.advantages(rewards, self.config.group_size, baseline)

    def score(self, rollout: Rollout) -> tuple[list[Sample], np.ndarray, Metrics]:
        """Returns samples, rewards f32[Q], and the mean of each term of the reward as metrics."""
        samples, rewards, terms = score_rollout(rollout, self.prompts, self.tokenizer, self.reward)
        failed = sum("failures" in sample for sample in samples)
        return samples, rewards, {"reward/failures": failed} | {
            f"reward/{name}": value for name, value in terms.items()}

    def learn(self, rollout: Rollout, advantage: np.ndarray) -> Metrics:
        """Updates the policy on one rollout and publishes it.

        With rl.updates = 0 the loss is 0, an empty sum, and the gap is that of the first
        micro-batch in canonical order.
        """
        metrics = (self._update_policy if self.config.rl.updates else self._measure_gap)(
            rollout, advantage)
        self.bad_steps = 0 if metrics["applied"] else self.bad_steps + 1
        self._publish(self.step_number + 1)
        return metrics | {f"rollout/{name}": metrics.pop(name) for name in learner.GAPS}

    def _publish(self, version: int) -> None:
        """Makes the policy what rollouts read; adapters are merged."""
        params = self.state.params
        if self.base is not None:
            merge = self._programs.get("merge") or programs.merge(
                self.config, self.arch, self.mesh).function
            params = lora.overlay(self.sampler.params, merge(self.base, params))
        self.sampler.publish(params, version)

    def _measure_gap(self, rollout: Rollout, advantage: np.ndarray) -> dict[str, float]:
        (batch, _), *_ = self._minibatches(rollout, advantage)
        gap = jax.device_get(self._programs["gap"](self.state.params, batch, self.base))
        return jax.tree.map(float, gap) | {"applied": 1.0, "loss": 0.0}

    def _update_policy(self, rollout: Rollout, advantage: np.ndarray) -> dict[str, float]:
        """Runs rl.updates epochs of rl.minibatches optimiser steps; returns metrics, those of
        `learner.over_steps` and of speed."""
        began, kl = time.perf_counter(), self.config.rl.kl_in_loss
        parts = self._minibatches(rollout, advantage)
        old = self._old_scores(parts)
        initial = [self._score(self.reference, part) if kl else None for part in parts]
        taught = [self.teacher and self._programs["teacher"](self.teacher.params, *part)
                  for part in parts]
        update, steps = self._programs["update"], []
        for _ in range(self.config.rl.updates):
            for part, acted, first, scores in zip(parts, old, initial, taught, strict=True):
                reference = (first, self._score(self.state.params, part)) if kl else None
                self.state, metrics = update(self.state, *part, acted, reference, self.base,
                                             scores)
                steps.append(jax.tree.map(float, jax.device_get(metrics)))
        tokens = self.config.rl.updates * sum(int(totals.columns) for _, totals in parts)
        return learner.over_steps(steps, len(parts)) | programs.speed(
            self.arch, self.mesh, tokens, time.perf_counter() - began)

    def _old_scores(self, parts: list[tuple[Batch, Totals]]) -> list[Array | None]:
        """Returns the log-probabilities of the policy that acted, of each part; None if the update
        computes them itself."""
        if not programs.reads_old(self.config):
            return [None] * len(parts)
        if self.config.learner.old_logprob == "rollout":
            return [batch.rollout_logprob for batch, _ in parts]
        return [self._score(self.state.params, part) for part in parts]

    def _score(self, params: ModelParams | None, part: tuple[Batch, Totals]) -> Array:
        return self._programs["score"](params, *part, self.base)

    # Persistence.

    def arrays(self) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint."""
        return {"actor": self.state.params, "optimizer": self.state.optimizer,
                "history": self.responses.arrays(),
                "control": jax.tree.map(np.asarray, self.sampler.engine.control),
                "acceptance": self.sampler.engine.acceptance, **self.order.arrays(),
                **self.drafter.arrays()}

    def meta(self) -> Json:
        """Returns what else a checkpoint holds, as JSON values."""
        return {"step": self.step_number, "seed": self.config.seed, "bad_steps": self.bad_steps,
                "drafter": self.drafter.meta(), **self._frozen}

    def restore(self, checkpoints: CheckpointReader, renewed: Collection[str] | None = None
                ) -> bool:
        """Continues from the newest intact checkpoint; returns whether there is one.

        Args:
          renewed: None asks for a checkpoint of this very config. Else what is named here
            ("control", "acceptance", "drafter"), and what has other shapes, starts anew.
        """
        drafter, anew = set(self.drafter.arrays()), set(renewed or ())
        anew |= drafter if "drafter" in anew else set()
        wanted = abstract({key: a for key, a in self.arrays().items() if key not in anew})
        needed = None if renewed is None else ("actor", "optimizer")
        found = checkpoints.restore_latest(wanted, needed)
        if found is None:
            return False
        _, arrays, meta = found
        if reshaped := sorted(wanted.keys() - arrays.keys()):
            self.warnings.append("parts of the checkpoint have other shapes and start anew: "
                                 + ", ".join(reshaped))
        for name, (field, path) in {"base": ("model.path", self.config.model.path),
                                    "teacher": ("rl.teacher", self.config.rl.teacher)}.items():
            saved = (self._frozen | meta).get(name)  # 0.2.0 saved it of adapters' base alone
            layers.check_identity(field, path, saved, self._frozen.get(name))
        self.state = LearnerState(arrays["actor"], arrays["optimizer"])
        self.step_number, self.bad_steps = meta["step"], meta["bad_steps"]
        engine = self.sampler.engine
        if "history" in arrays:
            self.responses.restore(arrays["history"])
        if self.order.moves:
            self.order.restore(arrays["prompts"])
        if "control" in arrays:
            engine.control, self.sampler.control_restored = arrays["control"], True
        if "acceptance" in arrays:
            engine.acceptance = jax.tree.map(np.asarray, arrays["acceptance"])
        self._publish(self.step_number)
        if drafter <= arrays.keys():
            self.drafter.restore(arrays, meta["drafter"])
        return True
