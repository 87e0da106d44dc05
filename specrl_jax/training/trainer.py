"""The RL step: generate, reward, advantage, update, publish, distil.

A step is policy gradient on groups of responses to the same prompts, on-policy unless
rollout.quota lets responses span steps. There is no value model, no replay of old rollouts, and no
generation while the policy trains. A reference policy is kept only for a KL penalty.
"""

import functools
import time
from collections.abc import Callable

import numpy as np

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.data import prompt_order
from specrl_jax.data.prompt_order import PromptOrder, step_prompts
from specrl_jax.data.prompts import PromptBatch, Prompts, make_prompts
from specrl_jax.distill import lifecycle
from specrl_jax.draft import response_cache
from specrl_jax.model import weights
from specrl_jax.rewards import judge
from specrl_jax.rewards.scoring import Sample, score_rollout
from specrl_jax.rl import algorithm
from specrl_jax.rl.experience import (
    Experience,
    Key,
    Rewarded,
    build_experience,
    join,
    keys_of,
    reward_rollout,
)
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rl.policy import Frozen, Policy, load
from specrl_jax.rollout import requests
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.layout import pad
from specrl_jax.rollout.metrics import rollout_metrics
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.state import PublishedPolicy, RolloutInputs, Speculation
from specrl_jax.runtime.checksum import checksum
from specrl_jax.runtime.machine import peak_rss
from specrl_jax.runtime.stderr import warn as loud
from specrl_jax.runtime.step_timer import StepTimer
from specrl_jax.structs import Metrics, Params, Rollout, ignore
from specrl_jax.training import passes
from specrl_jax.training.state import TrainState


class Trainer:
    """The programs of a run, and what no step changes; `run.train` adds files.

        trainer, state = Trainer.from_config(load_config("tiny"))
        state, metrics, samples = trainer.step(state)
    """

    def __init__(self, config: Config, source: weights.Source, prompts: Prompts, frozen: Frozen,
                 say: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self.config, self.prompts, self.tokenizer = config, prompts, source.tokenizer
        self.arch, self.mesh = source.arch, sharding.make_mesh(config.mesh)
        self.score = functools.partial(score_rollout, prompts=prompts, tokenizer=source.tokenizer,
                                       reward=judge.of_config(config.reward, warn),
                                       versions=config.rollout.quota > 0)
        self.algorithm = algorithm.resolve(config.rl)
        self.order = PromptOrder(config, len(prompts.tokens))
        self.policy = Policy(config, self.arch, self.mesh, frozen)
        self.sampler = Sampler(config, self.arch, self.tokenizer.stop_ids, self.mesh,
                               prompts=config.groups_in_flight, group=config.responses,
                               greedy=config.rl.greedy, warn=say, tokenizer=self.tokenizer,
                               records=True)
        self.drafter = lifecycle.make(config, self.sampler, prompts.tokens, warn)

    @classmethod
    def create(cls, config: Config, source: weights.Source, prompts: Prompts,
               say: Callable[[str], None] = ignore, warn: Callable[[str], None] = loud
               ) -> tuple["Trainer", TrainState]:
        """Returns a run's trainer and its state before the first step.

        `say` gets lines about what is loaded, `warn` about rewards and drafters that fail.
        """
        judge.check_answers(config.reward.terms, prompts.examples)
        algorithm.check_training(config, say)
        frozen, params = load(config, source, sharding.make_mesh(config.mesh), say)
        trainer = cls(config, source, prompts, frozen, say, warn)
        return trainer, trainer._initial_state(params)

    @classmethod
    def from_config(cls, config: Config, say: Callable[[str], None] = ignore
                    ) -> tuple["Trainer", TrainState]:
        """Returns `create` for the model and the data that `config` names.

        Raises:
          ConfigError: there is no such model or data, or a value cannot work.
        """
        source = weights.describe_source(config.model.path, family=config.model.family)
        return cls.create(config, source, make_prompts(config, source.tokenizer, say), say)

    def _initial_state(self, params: Params) -> TrainState:
        config, base = self.config, self.policy.frozen.base
        initial = self.sampler.initial_state(params if base is None else base)
        responses = response_cache.make(config.rollout.max_new_tokens, len(self.prompts.examples),
                                        config.spec.history_past)
        return TrainState(
            step=0, bad_steps=0, learner=self.policy.init(params), policy=initial.policy,
            drafter=self.drafter.init(initial.drafter), prompts=self.order.init(),
            speculation=initial.speculation.replace(responses=responses),
            in_flight=requests.begin(PromptBatch.of([]), 0, self.sampler.engine.shapes)
            if config.rollout.quota else None)

    def compile(self, state: TrainState, say: Callable[[str], None] = ignore
                ) -> tuple[TrainState, Metrics]:
        """Compiles whatever a step may run, finds what rounds cost and verifies the drafter."""
        if not self.sampler.engine.compiled:
            self.sampler.compile(state.policy, state.drafter.published, say,
                                 self.policy.add_programs)
            self.policy.finish_compiling()
            checksum(state.policy.params)  # compiles it
        began = time.perf_counter()
        speculation = self.sampler.find_costs(
            RolloutInputs(state.policy, state.drafter.published, state.speculation), say)
        metrics = {"time/profiling": time.perf_counter() - began}
        drafter = self.drafter.compile(state.drafter, state.policy, speculation, say)
        return state.replace(speculation=speculation, drafter=drafter), metrics

    def step(self, state: TrainState, progress: Callable[[int, int, int], None] = ignore,
             phase: Callable[[str], None] = ignore) -> tuple[TrainState, Metrics, list[Sample]]:
        """Runs one RL step, after compiling if need be; returns the next state, metrics, and what
        samples.jsonl holds of the step. `state` cannot be used again: its learner is donated.

        Raises:
          RewardError: a reward failed, before anything was donated: `state` can be used again.
        """
        if state.speculation.fresh or not self.sampler.engine.compiled:
            state, _ = self.compile(state)
        timer, step = StepTimer(phase), state.step
        metrics: Metrics = {"step": step, "checksum/policy": checksum(state.policy.params)}
        with timer("drafter"):
            drafter, verified = self.drafter.before_rollout(
                state.drafter, state.policy, state.speculation, step,
                functools.partial(self.sample, state))
        metrics["version/policy"] = state.policy.version
        metrics["version/drafter"] = drafter.published.version
        roll_out = self.roll_out_by_quota if self.config.rollout.quota else self.roll_out
        state, rewarded, drawn, rolled = roll_out(state.replace(drafter=drafter), progress, timer)
        experience = build_experience(self.config, self.algorithm, rewarded, drawn,
                                      state.policy.version)
        with timer("drafter"):  # while the policy that acted is still published
            drafter, collected = self.drafter.collect(
                state.drafter, state.policy, state.speculation, experience, step)
        with timer("learn"):
            learner, learned = self.policy.update(state.learner, experience)
            policy = self.publish(learner, state.policy, step + 1)
        with timer("drafter"):
            drafter, distilled = self.drafter.after_update(
                drafter, policy, state.speculation, step)
        metrics |= verified | rolled | experience.metrics | collected | learned | distilled
        drafter, spent = self.drafter.account(
            drafter, timer["drafter"], metrics.get("time/saved", 0.0))
        metrics |= spent | {"time/reward": timer["reward"], "time/learn": timer["learn"],
                            "time/step": timer.total, "memory/peak_bytes": peak_rss()}
        bad_steps = 0 if learned["applied"] else state.bad_steps + 1
        state = self._remember(state, rewarded).replace(
            step=step + 1, bad_steps=bad_steps, learner=learner, policy=policy, drafter=drafter)
        return state, metrics, experience.samples

    def roll_out(self, state: TrainState, progress: Callable[[int, int, int], None],
                 timer: StepTimer) -> tuple[TrainState, list[Rewarded], list[Key], Metrics]:
        """Generates and rewards the step's prompts, and further ones as rl.filter asks.

        Returns:
          The state, the rewarded rollouts, the keys of their groups in the order in which the
          prompts were drawn, and metrics.
        """
        rollouts, results, rewarded = [], [], []
        while len(rewarded) < self.config.rl.most_rollouts and (
                sum(one.useful for one in rewarded) < self.config.prompts_per_step):
            with timer("rollout"):
                state, rollout, result = self.generate(state, progress, len(rewarded))
            with timer("reward"):
                rewarded.append(self.reward(rollout, state.learner))
            rollouts.append(rollout)
            results.append(result)
        drawn = [(state.step, *key) for key in self._prompts(state, len(rewarded)).keys()]
        state = state.replace(prompts=prompt_order.advance(state.prompts, len(drawn)))
        return state, rewarded, drawn, rollout_metrics(
            join([rollout.replace(records=None) for rollout in rollouts]), results,
            state.speculation.plain_round_seconds)

    def roll_out_by_quota(self, state: TrainState, progress: Callable[[int, int, int], None],
                          timer: StepTimer
                          ) -> tuple[TrainState, list[Rewarded], list[Key], Metrics]:
        """Starts new groups, and extends all groups in flight by passes of rollout.quota tokens
        until the step has enough complete ones; returns as `roll_out`."""
        config, results = self.config, []

        def extend(flight: Rollout) -> Rollout:
            nonlocal state
            with timer("rollout"):
                past = response_cache.past(
                    state.speculation.responses, flight.prompt_id[::config.responses],
                    self.sampler.engine.layout.past)
                flight, speculation, result = self.sampler.extend(
                    flight, state.policy, state.drafter.published, state.speculation, "train",
                    past=past, limit=flight.length + config.rollout.quota, progress=progress)
            results.append(result)
            state = self._after(state, speculation, result)
            return flight

        def reward(rollout: Rollout) -> Rewarded:
            with timer("reward"):
                return self.reward(rollout, state.learner)

        state, flight = self._start(state)
        flight, rewarded = passes.collect(config, flight, extend, reward)
        rolled = join([one.rollout for one in rewarded])
        metrics = rollout_metrics(rolled, results, state.speculation.plain_round_seconds)
        metrics |= passes.metrics(rolled, flight, state.policy.version, len(results))
        drawn = keys_of(rolled, config.group_size)
        return state.replace(in_flight=flight), rewarded, drawn, metrics

    def with_prompts(self, flight: Rollout) -> Rollout:
        """Returns groups in flight with the tokens of their prompts."""
        prompts = [self.prompts.tokens[self.prompts.index_of[int(i)]] for i in flight.prompt_id]
        return flight.replace(prompt=pad(prompts, self.config.rollout.max_prompt_tokens)[0])

    def _start(self, state: TrainState) -> tuple[TrainState, Rollout]:
        """Returns the groups in flight with new ones, as many as there is room for."""
        assert state.in_flight is not None  # `_initial_state` has made it
        count = self.config.groups_in_flight - len(state.in_flight.length) // self.config.responses
        batch = self.prompts.batch(self.order.indices(state.prompts, state.step, count))
        new = requests.begin(batch, state.step, self.sampler.engine.shapes)
        return state.replace(prompts=prompt_order.advance(state.prompts, count)), join(
            [state.in_flight, new])

    def generate(self, state: TrainState, progress: Callable[[int, int, int], None] = ignore,
                 earlier: int = 0) -> tuple[TrainState, Rollout, Result]:
        """Generates responses to the step's next prompts; `earlier` counts the rollouts that the
        step has had."""
        batch = self._prompts(state, earlier + 1).part(slice(-self.config.prompts_per_step, None))
        past = response_cache.past(state.speculation.responses, batch.prompt_id,
                                   self.sampler.engine.layout.past)
        rollout, speculation, result = self.sampler.generate(
            batch, state.policy, state.drafter.published, state.speculation, "train", state.step,
            past=past, progress=progress)
        return self._after(state, speculation, result), rollout, result

    def _after(self, state: TrainState, speculation: Speculation, result: Result) -> TrainState:
        """Returns the state with what a rollout's speculation has learned."""
        if result.counters["broken"]:
            state = state.replace(drafter=self.drafter.switch_off(state.drafter))
        return state.replace(speculation=speculation)

    def sample(self, state: TrainState, number: int) -> Experience:
        """Generates and rewards the prompts of a step outside RL."""
        indices = step_prompts(len(self.prompts.tokens), self.config.seed, number,
                               self.config.prompts_per_step)
        batch = self.prompts.batch(indices)
        rollout, _, _ = self.sampler.generate(
            batch, state.policy, state.drafter.published, state.speculation, "generate", number)
        rewarded = [self.reward(rollout, state.learner)]
        drawn = [(number, *key) for key in batch.keys()]
        return build_experience(self.config, self.algorithm, rewarded, drawn,
                                state.policy.version)

    def reward(self, rollout: Rollout, learner: LearnerState) -> Rewarded:
        """Rewards a rollout; `learner` is read only for a KL penalty in the reward."""
        return reward_rollout(self.config, self.algorithm, rollout, self.score,
                              functools.partial(self.policy.sequence_kl, learner))

    def _prompts(self, state: TrainState, rollouts: int) -> PromptBatch:
        """Returns the prompts of the step's first `rollouts`, in the order of draws."""
        return self.prompts.batch(self.order.indices(
            state.prompts, state.step, rollouts * self.config.prompts_per_step))

    def publish(self, learner: LearnerState, published: PublishedPolicy, version: int
                ) -> PublishedPolicy:
        """Returns the learner's policy as rollouts read it; `published` is an earlier one."""
        return self.sampler.publish(
            self.policy.to_publish(learner.params, published.params), version)

    def _remember(self, state: TrainState, rewarded: list[Rewarded]) -> TrainState:
        """Returns the state with the step's prompts and responses, for the order of prompts and
        for drafters."""
        whole = join([one.rollout.replace(records=None) for one in rewarded])
        spec = self.config.spec
        size, speculation = self.config.group_size, state.speculation
        rewards = np.concatenate([one.scores.rewards for one in rewarded]).reshape(-1, size)
        indices = np.asarray([self.prompts.index_of[int(i)] for i in whole.prompt_id[::size]])
        if spec.history_past:
            speculation = speculation.replace(responses=response_cache.add(
                speculation.responses, whole.prompt_id, whole.tokens, whole.length,
                spec.history_past))
        return state.replace(speculation=speculation,
                             prompts=prompt_order.observe(state.prompts, indices, rewards))
