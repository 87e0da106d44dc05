"""The policy that learns: its programs, the weights that no step changes, and its updates."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.model import architecture, layers, lora, weights
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.tokenizer import Tokenizer, check_same_tokens
from specrl_jax.rl import learner, programs
from specrl_jax.rl.batch import Batch, Totals
from specrl_jax.rl.experience import Experience
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rl.optimizer import make_optimizer
from specrl_jax.runtime.compilation import Compiler, Name
from specrl_jax.structs import Array, Metrics, ModelParams, Params, Rollout


class Teacher(NamedTuple):
    """The teacher of on-policy distillation: a frozen model, whose log-probabilities the
    policy's approach."""

    arch: Architecture
    params: Params  # in model.dtype, split as the learner's


class Frozen(NamedTuple):
    """Weights that no step changes."""

    base: Params | None  # that adapters are added to
    reference: Params | None  # the policy at the start, for the KL
    teacher: Teacher | None
    identities: dict[str, str]  # of the models that a run reads besides its own weights


def load(config: Config, source: weights.Source, mesh: Mesh, say: Callable[[str], None]
         ) -> tuple[Frozen, Params]:
    """Reads the weights of a run; returns those that no step changes, and those that learn.

    Raises:
      ConfigError: the teacher does not exist or has other tokens.
    """
    described = architecture.describe(source.arch, layers.are_scanned(sharding.platform(mesh)))
    for axis in sorted(sharding.replicated_axes(described, sharding.LEARNER_RULES, mesh)):
        say(f"replicated, because the mesh does not divide it: {axis}")
    say(f"loading {source.source}")
    whole = source.params(sharding.shardings(described, sharding.LEARNER_RULES, mesh))
    base, params = programs.initial(config, source.arch, mesh, whole)
    identities = {"base": layers.identity(whole)} if base is not None or config.rl.kl else {}
    reference = jax.tree.map(jnp.copy, params) if config.rl.kl else None  # updates donate params
    if taught := _load_teacher(config, source.tokenizer, mesh, say):
        identities["teacher"] = layers.identity(taught.params)
    return Frozen(base, reference, taught, identities), params


def _load_teacher(config: Config, tokenizer: Tokenizer, mesh: Mesh, say: Callable[[str], None]
                  ) -> Teacher | None:
    """Reads the model at `rl.teacher`; returns None if there is none, or no update reads it.

    Raises:
      ConfigError: there is no such model, or its tokens are not those of `tokenizer`.
    """
    if not config.rl.teacher or not config.rl.updates:
        return None
    source = weights.describe_source(config.rl.teacher, field="rl.teacher")
    check_same_tokens("rl.teacher", config.rl.teacher, source.tokenizer, tokenizer)
    say(f"loading the teacher {source.source}")
    frozen = programs.abstract_frozen(config, source.arch, mesh)
    shardings = jax.tree.map(lambda a: a.sharding, frozen)
    return Teacher(source.arch, lora.freeze(source.params(shardings), config.model.dtype))


class Policy:
    """Programs of the policy's learner. What they update is a LearnerState."""

    def __init__(self, config: Config, arch: Architecture, mesh: Mesh, frozen: Frozen) -> None:
        self.config, self.arch, self.mesh, self.frozen = config, arch, mesh, frozen
        self._programs: dict[Name, Any] = {}

    def init(self, params: Params) -> LearnerState:
        """Returns the state before the first update."""
        state = programs.abstract_state(self.config, self.arch, self.mesh)
        init = jax.jit(make_optimizer(self.config.learner).init,
                       out_shardings=jax.tree.map(lambda a: a.sharding, state.optimizer))
        return LearnerState(params, init(params))

    def add_programs(self, compiler: Compiler) -> None:
        """Starts compiling every program that a step may run."""
        teacher = self.frozen.teacher
        self._programs = {p.name: compiler.add(p) for p in programs.programs(
            self.config, self.arch, self.mesh, teacher and teacher.arch)}

    def finish_compiling(self) -> None:
        """Waits for the programs of `add_programs`."""
        self._programs = {name: future.result() for name, future in self._programs.items()}

    def to_publish(self, params: Params, published: Params) -> Params:
        """Returns the weights that rollouts read: `params`, or the base with adapters merged.

        Args:
          published: earlier ones, whose weights without adapters are shared.
        """
        if self.frozen.base is None:
            return params
        merge = self._programs.get("merge") or programs.merge(
            self.config, self.arch, self.mesh).function
        return lora.overlay(published, merge(self.frozen.base, params))

    def update(self, state: LearnerState, experience: Experience
               ) -> tuple[LearnerState, Metrics]:
        """Runs rl.updates epochs of rl.minibatches optimiser steps, which donate `state`.

        Returns:
          The new state; metrics of `learner.over_steps` and of speed. With rl.updates = 0 the loss
          is 0, an empty sum, and the gap is that of the first micro-batch in canonical order.
        """
        began, parts = time.perf_counter(), self.minibatches(experience)
        if not self.config.rl.updates:
            return state, _named(self._gap(state.params, parts[0][0]))
        old, initial, taught = zip(*(self._fixed_logprobs(state, part) for part in parts),
                                   strict=True)
        steps = []
        for _ in range(self.config.rl.updates):
            for part, acted, first, teacher_logprobs in zip(parts, old, initial, taught,
                                                            strict=True):
                reference = None if first is None else (first, self._logprobs(state.params, part))
                state, metrics = self._programs["update"](
                    state, *part, acted, reference, self.frozen.base, teacher_logprobs)
                steps.append(jax.tree.map(float, jax.device_get(metrics)))
        tokens = self.config.rl.updates * sum(int(totals.columns) for _, totals in parts)
        return state, _named(learner.over_steps(steps, len(parts))) | programs.speed(
            self.arch, self.mesh, tokens, time.perf_counter() - began)

    def sequence_kl(self, state: LearnerState, rollout: Rollout) -> np.ndarray:
        """Returns an estimate of the KL to the reference of each sequence, f32[Q], or f32[groups]
        of a rollout with one sequence a prompt."""
        config = self.config
        together = config.sequences // len(rollout.length)  # group_size where each is a group's
        rollout = jax.tree.map(lambda a: np.repeat(a, together, 0), rollout)
        rollout = rollout.replace(length=np.where(
            np.arange(config.sequences) % together, 0, rollout.length))
        sums = []
        for host in programs.host_batches(config, rollout, np.ones(config.sequences, np.float32)):
            part = sharding.put(programs.batch_shardings(self.mesh), host)
            by_slot = np.asarray(self._programs["kl"](part[0], *(
                self._logprobs(p, part) for p in (state.params, self.frozen.reference))))
            real = host[0].sequence >= 0
            of_part = np.zeros(config.sequences // config.rl.minibatches, np.float32)
            of_part[host[0].sequence[real]] = by_slot[real]
            sums.append(of_part)
        return np.concatenate(sums)[::together]

    def minibatches(self, experience: Experience) -> list[tuple[Batch, Totals]]:
        """Returns the batch of each optimiser step, on the devices."""
        shardings = programs.batch_shardings(self.mesh)
        return [sharding.put(shardings, part) for part in programs.host_batches(
            self.config, experience.learned, experience.advantage)]

    def _fixed_logprobs(self, state: LearnerState, part: tuple[Batch, Totals]
                        ) -> tuple[Array | None, Array | None, Array | None]:
        """Returns log-probabilities of a batch under the policy that acted, the reference and the
        teacher; None for those that the update does not read, or computes itself."""
        config, frozen = self.config, self.frozen
        old = None
        if programs.reads_old(config):
            old = part[0].rollout_logprob if config.learner.old_logprob == "rollout" else (
                self._logprobs(state.params, part))
        return (old, self._logprobs(frozen.reference, part) if config.rl.kl_in_loss else None,
                self._programs["teacher"](frozen.teacher.params, *part)
                if frozen.teacher else None)

    def _logprobs(self, params: ModelParams | None, part: tuple[Batch, Totals]) -> Array:
        return self._programs["compute_logprobs"](params, *part, self.frozen.base)

    def _gap(self, params: Params, batch: Batch) -> Metrics:
        gap = jax.device_get(self._programs["gap"](params, batch, self.frozen.base))
        return jax.tree.map(float, gap) | {"applied": 1.0, "loss": 0.0}


def _named(metrics: Metrics) -> Metrics:
    """Returns metrics by the names that metrics.jsonl uses: the gap is the rollout's."""
    return {f"rollout/{name}" if name in learner.GAPS else name: value
            for name, value in metrics.items()}
