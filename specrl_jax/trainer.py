"""The step: the only file that knows all the others."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.distill import online
from specrl_jax.draft.response_cache import Memory, capacity
from specrl_jax.io import data, launches
from specrl_jax.io.checkpoint import Checkpoints
from specrl_jax.io.checksum import checksum
from specrl_jax.io.memory import peak_rss
from specrl_jax.model import architecture, weights
from specrl_jax.rl import learner
from specrl_jax.rl.advantage import group_advantages
from specrl_jax.rl.learner import Batch, LearnerState, Totals
from specrl_jax.rl.reward import compose
from specrl_jax.rollout.prompts import PromptBatch, Prompts
from specrl_jax.rollout.sampler import Sampler, rollout_metrics
from specrl_jax.structs import Rollout

GAPS = ("logprob_gap", "logprob_gap_max", "logprob_gap_tokens")  # under the weights that acted


class Trainer:
    """One run's state and programs. `step()` is one RL step; `Run` adds files around it."""

    def __init__(self, config: Config, source: weights.Source, prompts: Prompts,
                 say: Callable[[str], None]) -> None:
        self.config, self.prompts, self.tokenizer = config, prompts, source.tokenizer
        self.reward = compose(config.reward.terms, config.reward.weights)
        self.mesh = sharding.make_mesh(config.mesh)
        self.arch, self.step_number, self.bad_steps = source.arch, 0, 0
        described = architecture.describe(self.arch)
        for axis in sorted(sharding.replicated_axes(described, sharding.LEARNER_RULES, self.mesh,
                                                    architecture.is_param)):
            say(f"replicated, because the mesh does not divide it: {axis}")
        self.places = sharding.shardings(described, sharding.LEARNER_RULES, self.mesh,
                                         architecture.is_param)
        say(f"loading {source.source}")
        params = sharding.put(self.places, source.params())
        self.reference = jax.tree.map(jnp.copy, params) if config.learner.kl else None
        self.optimizer = learner.make_optimizer(config.learner)
        self.state = LearnerState(params, jax.jit(
            self.optimizer.init, out_shardings=self._optimizer_places(params))(params))
        self.sampler = Sampler(config, self.arch, self.tokenizer.stop_ids, self.mesh,
                               prompts=config.prompts_per_step, group=config.group_size, warn=say,
                               tokenizer=self.tokenizer)
        self.sampler.publish(params, 0)
        self.warnings: list[str] = []  # what a user should know of the drafter, not told yet
        self.life, self.evolution = online.begin(config, self.sampler, prompts.tokens,
                                                   self.warnings.append)
        spec, buffer = config.spec, config.rollout.max_new_tokens
        most = spec.history_past or 1
        rows = capacity(spec.history_megabytes, buffer, len(prompts.examples), most)
        self.memory = Memory(rows, buffer, most, spec.history_window)

    def _optimizer_places(self, params: Any) -> Any:
        """AdamW's moments lie where their parameters do; everything else is replicated."""
        shapes = jax.eval_shape(self.optimizer.init, params)
        like = jax.tree.structure(params)

        def place(node: Any) -> Any:
            if jax.tree.structure(node) == like:
                return self.places
            return sharding.replicated(self.mesh)

        return jax.tree.map(place, shapes, is_leaf=lambda n: jax.tree.structure(n) == like)

    # Programs.

    def compile(self, say: Callable[[str], None]) -> None:
        """Compiles everything a step may run."""
        self.sampler.compile(say)
        checksum(self.sampler.params)
        if self.life:
            self.life.begin()
        if self.evolution:
            self.evolution.compile(say)
        config = self.config
        batch, totals = self._batch(self._blank_rollout(), np.zeros(config.sequences, np.float32))
        if config.learner.updates:
            say("compiling the policy update")
            self._compile_updates(batch, totals)
        else:
            gap = functools.partial(learner.first_gap, self.arch, config.learner.remat)
            self._gap = jax.jit(gap, out_shardings=sharding.replicated(self.mesh)).lower(
                self.state.params, batch).compile()

    def _compile_updates(self, batch: Batch, totals: Totals) -> None:
        config, scores = self.config, batch.rollout_logprob
        if self._needs_scores:
            score = functools.partial(learner.score, self.arch, config.learner.remat)
            self._score = jax.jit(score).lower(self.state.params, batch).compile()
        places = jax.tree.map(lambda a: a.sharding, self.state)
        update = functools.partial(learner.update, self.arch, config.learner,
                                   config.rollout.max_new_tokens)
        self._update = jax.jit(
            update, donate_argnums=(0,), out_shardings=(places, sharding.replicated(self.mesh))
        ).lower(self.state, batch, totals, scores if self._reads_old else None,
                scores if config.learner.kl else None).compile()

    @property
    def _reads_old(self) -> bool:
        return self.config.learner.updates > 1 or self.config.learner.old_logprob == "rollout"

    @property
    def _needs_scores(self) -> bool:
        kl, old = self.config.learner.kl, self.config.learner.old_logprob
        return bool(kl) or (self.config.learner.updates > 1 and old == "learner")

    def _blank_rollout(self) -> Rollout:
        q, r = self.config.sequences, self.config.rollout
        ints, floats = np.zeros((q, r.max_new_tokens), np.int32), np.zeros(
            (q, r.max_new_tokens), np.float32)
        one = np.ones(q, np.int32)
        return Rollout(
            prompt=np.zeros((q, r.max_prompt_tokens), np.int32), prompt_length=one, tokens=ints,
            length=one, logprob=floats, raw_logprob=floats, kept_mass=floats, prompt_id=one,
            occurrence=one, sample_id=one, stopped=one > 0, commits=ints, rounds=one)

    def _batch(self, rollout: Rollout, advantage: np.ndarray) -> tuple[Batch, Totals]:
        config = self.config.learner
        batch, totals = learner.make_batch(
            rollout, advantage, self.config.rollout.temperature,
            rows=config.micro_batch // self.config.together,
            together=self.config.together, keep_all=bool(config.kl) or config.updates > 1)
        rows = NamedSharding(self.mesh, P(None, sharding.ROWS))
        whole = sharding.replicated(self.mesh)
        return sharding.put(rows, batch), sharding.put(whole, totals)

    # The step.

    def step(self, progress: Callable[[int, int, int], None] = lambda *counts: None,
             phase: Callable[[str], None] = lambda name: None
             ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One RL step: the metrics, and a record of each sequence."""
        began = time.perf_counter()
        phase("drafter")
        evolved = self._before_rollout()
        phase("rollout")
        started = time.perf_counter()
        rollout, record = self.rollout(progress)
        phase("reward")
        rewarded = time.perf_counter()
        samples, rewards, parts = self._judge(rollout, self.step_number)
        advantage = self._advantages(rewards)
        judged = time.perf_counter()
        phase("drafter")
        if self.evolution:
            evolved |= self.evolution.collect(rollout, rewards, advantage, self.step_number)
        phase("learn")
        learned = time.perf_counter()
        record |= self.learn(rollout, advantage)
        ended = time.perf_counter()
        if self.evolution:
            phase("drafter")
            evolved |= self.evolution.train(self.step_number)
        if self.life:
            spent = started - began + learned - judged + time.perf_counter() - ended
            evolved |= self.life.account(spent, record.get("time/saved", 0.0))
        groups = advantage.reshape(-1, self.config.group_size)
        record |= evolved | parts | {
            "reward/mean": float(rewards.mean()), "reward/std": float(rewards.std()),
            "reward/useful_groups": float((groups != 0).any(1).mean()),
            "time/reward": judged - rewarded, "time/learn": ended - learned,
            "time/step": time.perf_counter() - began, "step": self.step_number,
            "memory/peak_bytes": peak_rss()}
        self.step_number += 1
        return record, samples

    def _before_rollout(self) -> dict[str, Any]:
        """What becomes of the drafter before a step's rollout, and what will draft it."""
        acts = {"checksum/policy": checksum(self.sampler.params)}
        if not self.life:
            return acts
        fault, told = self.life.inspect(), {"distill/updates": 0} if self.evolution else {}
        if self.evolution and self.config.distill.when == "once" and self.step_number == 0:
            told |= self._learn_first()
        told |= {"drafter/fault": fault} if fault else {}
        return {"drafter/faults": self.life.faults, "drafter/held": float(self.life.held),
                "checksum/drafter": checksum(self.life.head)} | acts | told

    def _learn_first(self) -> dict[str, Any]:
        """The one training of `once`: on answers that the initial actor gives outside RL."""
        for number in range(self.config.distill.rollouts):
            rollout, _ = self.sampler.generate(self._asked(number), "generate", number)
            rewards = self._judge(rollout, number)[1]
            self.evolution.keep(rollout, rewards, self._advantages(rewards), number)
        return self.evolution.train_now(0)

    def _advantages(self, rewards: np.ndarray) -> np.ndarray:
        """f32[Q] within each group."""
        return group_advantages(rewards.reshape(-1, self.config.group_size),
                                scale=self.config.learner.scale_advantage).reshape(-1)

    def _asked(self, step: int) -> PromptBatch:
        chosen = self.chosen(step)
        ids = np.asarray([self.prompts.examples[i]["id"] for i in chosen], np.int32)
        return PromptBatch([self.prompts.tokens[i] for i in chosen], ids, data.occurrences(ids))

    def rollout(self, progress: Callable[[int, int, int], None] = lambda *counts: None
                ) -> tuple[Rollout, dict[str, Any]]:
        """The sequences of this step, and the rollout's metrics."""
        asked = self._asked(self.step_number)
        past = self.memory.past(asked.prompt_id, self.sampler.engine.layout.past,
                                self.step_number)
        rollout, result = self.sampler.generate(asked, "train", self.step_number, past=past,
                                                progress=progress)
        if self.life and result.counters["broken"]:
            self.life.silence()
        if self.config.spec.history_past:
            self.memory.add(rollout.prompt_id, rollout.tokens, rollout.length, self.step_number)
        saved = launches.saved(result.trace, self.sampler.plain)
        return rollout, rollout_metrics(rollout, result) | saved | {
            "version/policy": rollout.policy_version, "version/drafter": rollout.drafter_version}

    def chosen(self, step: int) -> np.ndarray:
        """Indices of a step's examples, a function of seed and step."""
        return data.step_prompts(len(self.prompts.examples), self.config.seed, step,
                                 self.config.prompts_per_step)

    def _judge(self, rollout: Rollout, step: int
               ) -> tuple[list[dict[str, Any]], np.ndarray, dict[str, float]]:
        """Records of all sequences, rewards f32[Q], and the mean of each term."""
        index = {self.prompts.examples[i]["id"]: i for i in self.chosen(step)}
        samples, terms = [], []
        for q in range(len(rollout.length)):
            i, length = index[int(rollout.prompt_id[q])], int(rollout.length[q])
            tokens = rollout.tokens[q, :length].tolist()
            said = tokens[:-1] if rollout.stopped[q] else tokens
            completion = self.tokenizer.decode(said)
            reward, parts = self.reward(self.prompts.texts[i], completion, self.prompts.examples[i])
            terms.append(parts)
            samples.append({
                "prompt_id": int(rollout.prompt_id[q]), "occurrence": int(rollout.occurrence[q]),
                "sample_id": int(rollout.sample_id[q]), "prompt": self.prompts.texts[i],
                "completion": completion, "tokens": tokens, "reward": reward,
                "commits": rollout.commits[q, : rollout.rounds[q]].tolist()})
        rewards = np.asarray([s["reward"] for s in samples], np.float32)
        return samples, rewards, {
            f"reward/{name}": float(np.mean([t[name] for t in terms])) for name in terms[0]}

    def learn(self, rollout: Rollout, advantage: np.ndarray) -> dict[str, Any]:
        """Updates the actor on one rollout and publishes it.

        With learner.updates = 0 the loss is an empty sum, 0, and the gap is that of the first
        micro-batch in canonical order.
        """
        run = self._update_actor if self.config.learner.updates else self._only_score
        updates = run(rollout, advantage)
        # Only the first update sees the weights that acted, which the gap is about.
        record = updates[-1] | {name: updates[0][name] for name in GAPS}
        record["applied"] = min(one["applied"] for one in updates)
        self.bad_steps = 0 if record["applied"] else self.bad_steps + 1
        self.sampler.publish(self.state.params, self.step_number + 1)
        return record | {f"rollout/{name}": record.pop(name) for name in GAPS}

    def _only_score(self, rollout: Rollout, advantage: np.ndarray) -> list[dict[str, float]]:
        batch, _ = self._batch(rollout, np.zeros_like(advantage))  # which leaves the order as it is
        gap = jax.tree.map(float, self._gap(self.state.params, batch))
        return [gap | {"applied": 1.0, "loss": 0.0}]

    def _update_actor(self, rollout: Rollout, advantage: np.ndarray) -> list[dict[str, float]]:
        """The metrics of each update."""
        batch, totals = self._batch(rollout, advantage)
        old = batch.rollout_logprob if self._reads_old else None
        if self._reads_old and self.config.learner.old_logprob == "learner":
            old = self._score(self.state.params, batch)
        reference = self._score(self.reference, batch) if self.config.learner.kl else None
        updates = []
        for _ in range(self.config.learner.updates):
            self.state, record = self._update(self.state, batch, totals, old, reference)
            updates.append(jax.tree.map(float, record))
        return updates

    # Persistence.

    def arrays(self) -> dict[str, Any]:
        """What a checkpoint holds besides `meta`."""
        return {"actor": self.state.params, "optimizer": self.state.optimizer,
                "history": self.memory.arrays(),
                "control": jax.tree.map(np.asarray, self.sampler.engine.control),
                "acceptance": self.sampler.engine.acceptance,
                **({"drafter_account": self.life.seconds} if self.life else {}),
                **(self.evolution.arrays() if self.evolution else {})}

    def meta(self) -> dict[str, Any]:
        return {"step": self.step_number, "seed": self.config.seed, "bad_steps": self.bad_steps,
                **({"life": self.life.meta()} if self.life else {}),
                **({"drafter": self.evolution.meta()} if self.evolution else {})}

    def restore(self, checkpoints: Checkpoints) -> bool:
        """Continues from the newest intact checkpoint; False if there is none."""
        abstract = jax.tree.map(
            lambda a: a if isinstance(a, np.ndarray) else jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=a.sharding), self.arrays())
        found = checkpoints.restore_latest(abstract)
        if found is None:
            return False
        _, arrays, meta = found
        self.state = LearnerState(arrays["actor"], arrays["optimizer"])
        self.memory.restore(arrays["history"])
        self.sampler.engine.control = arrays["control"]
        self.sampler.engine.acceptance = jax.tree.map(np.asarray, arrays["acceptance"])
        self.step_number, self.bad_steps = meta["step"], meta["bad_steps"]
        self.sampler.restored = True
        self.sampler.publish(self.state.params, self.step_number)
        if self.life:
            self.life.seconds = np.array(arrays["drafter_account"])
            self.life.restore(meta["life"], arrays.get("drafter"))
            if self.life.held:
                self.sampler.draft_to(0)
        if self.evolution:
            self.evolution.restore(arrays, meta["drafter"])
        return True
