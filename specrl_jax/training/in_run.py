"""Evaluation while a run goes on: the held-out problems every `eval.every` steps, and the best one.

Noise is a function of indices and of a stream of its own, and what speculation learns is dropped,
so that an evaluation changes no token of the training. Its answers are those of eval.py.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError, check
from specrl_jax.data.prompts import Prompts
from specrl_jax.evaluation.evaluate import Problems, task_config
from specrl_jax.metrics.progress import Progress
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.state import RolloutInputs
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.workdir import BEST_FILE
from specrl_jax.structs import Json, Metrics
from specrl_jax.training.state import TrainState
from specrl_jax.training.trainer import Trainer

COMPARED = ("split", "path", "examples", "samples", "temperature", "reward")  # fields of eval


def write_best(workdir: Path, best: Json | None) -> None:
    """Names the checkpoint of the best evaluation in BEST_FILE, or removes that; in process 0."""
    if jax.process_index() == 0:
        if best is None:
            (workdir / BEST_FILE).unlink(missing_ok=True)
        else:
            write_atomically(workdir / BEST_FILE, json.dumps(best, indent=2) + "\n")


class InRun:
    """Evaluates the policy that a trainer's state has published.

    Args:
      say: called with lines about the data.
      warn: called with lines about rewards that fail.

    Raises:
      ConfigError: there is no such split, or nothing of it is held out.
    """

    def __init__(self, trainer: Trainer, say: Callable[[str], None],
                 warn: Callable[[str], None]) -> None:
        config = trainer.config
        self.every = config.eval.every
        try:
            self.problems = Problems(config, trainer.tokenizer, say, warn)
        except ConfigError as error:
            raise ConfigError(f"eval.every = {self.every}: {error}") from error
        check_held_out(config, self.problems.prompts, trainer.prompts, say)
        self._compared = {name: getattr(config.eval, name) for name in COMPARED}
        shapes = trainer.sampler.engine.shapes
        if self.problems.samples == shapes.group and not trainer.sampler.greedy:
            self._at_once = shapes.sequences * shapes.shards // shapes.group
            self._sampler = trainer.sampler.with_config(task_config(config))
            self._own = None
        else:
            self._at_once = self.problems.at_once(sharding.shard_count(trainer.mesh))
            self._sampler = _sampler(task_config(config), trainer, self._at_once,
                                     self.problems.samples, warn)
            self._own = self._sampler.engine.initial_speculation()

    def compile(self, state: TrainState, say: Callable[[str], None]) -> TrainState:
        """Compiles what the trainer has not compiled: nothing where eval.samples = group_size.
        If the best evaluation so far had other settings, clears it and reports that."""
        if self._own is not None:
            self._own = self._sampler.prepare(
                RolloutInputs(state.policy, state.drafter.published, self._own), say).speculation
        best = state.best
        if best is not None and {name: best[name] for name in COMPARED} != self._compared:
            say(f"another evaluation than before: checkpoint {best['step']} is no longer the best")
            return state.replace(best=None)
        return state

    def after(self, state: TrainState, progress: Progress) -> tuple[TrainState, Metrics]:
        """Returns the state with its best evaluation, and the metrics of the evaluation that is
        due after its step; {} where none is."""
        if state.step % self.every:
            return state, {}
        began, speculation = time.perf_counter(), state.speculation
        if self._own is not None:
            speculation = self._own.replace(acceptance=speculation.acceptance)
        results = self.problems.solve(
            self._sampler, RolloutInputs(state.policy, state.drafter.published, speculation),
            self._at_once, progress).results()
        best = state.best
        if best is None or results["accuracy"] > best["accuracy"]:
            best = {"step": state.step, "accuracy": results["accuracy"]} | self._compared
        return state.replace(best=best), metrics_of(results) | {
            "eval/best_step": best["step"], "time/eval": time.perf_counter() - began}


def _sampler(config: Config, trainer: Trainer, prompts: int, group: int,
             warn: Callable[[str], None]) -> Sampler:
    """Returns a sampler of the trainer's model with other shapes."""
    slots = min(config.rollout.batch_size, prompts * group)
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, batch_size=slots))
    return Sampler(config, trainer.arch, trainer.tokenizer.stop_ids, trainer.mesh, prompts=prompts,
                   group=group, warn=warn, tokenizer=trainer.tokenizer)


def check_held_out(config: Config, held_out: Prompts, training: Prompts,
                   say: Callable[[str], None]) -> None:
    """Raises ConfigError if all problems are trained on; `say` gets a line if some are."""
    known = set(training.texts)
    shared, total = sum(text in known for text in held_out.texts), len(held_out.texts)
    check(shared < total, "eval.split", config.eval.split,
          f"all {total} examples of {config.data.name} that it selects are trained on; name a "
          "split that is held out, or a file in eval.path")
    if shared:
        say(f"{shared} of the {total} examples of the evaluation are trained on, too")


def metrics_of(results: dict[str, Any]) -> Metrics:
    """Returns the metrics of an evaluation's results, see `evaluate`."""
    metrics = {"eval/accuracy": results["accuracy"], "eval/accuracy_low": results["interval"][0],
               "eval/accuracy_high": results["interval"][1],
               "eval/length_mean": results["mean_length"],
               "eval/clipped_fraction": 1 - results["stopped"],
               "eval/accept_length": results["accept_length"]}
    for k, passed in list(results["pass_at"].items())[1:]:
        metrics |= {f"eval/pass_at_{k}": passed["mean"],
                    f"eval/pass_at_{k}_low": passed["interval"][0],
                    f"eval/pass_at_{k}_high": passed["interval"][1]}
    return metrics
