"""Evaluation while a run goes on: the held-out problems every `eval.every` steps, and the best one.

Noise is a function of indices and of a stream of its own, and what speculation has learned is put
back, so that an evaluation changes no token of the training. Its answers are those of eval.py.
"""

import copy
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specrl_jax import sharding
from specrl_jax.checkpoint.checkpoints import BEST
from specrl_jax.config import Config, ConfigError, check
from specrl_jax.data.prompts import Prompts
from specrl_jax.evaluation.evaluate import Problems, task_config
from specrl_jax.metrics.progress import Progress
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.workdir import BEST_FILE
from specrl_jax.structs import Json, Metrics
from specrl_jax.trainer import Trainer

OF = ("split", "path", "examples", "samples", "temperature", "reward")  # what makes two comparable


class Best:
    """The best evaluation of a run so far: its checkpoint is kept, also while nothing evaluates."""

    def __init__(self, meta: Json | None = None) -> None:
        """Goes on from a checkpoint's meta."""
        # Step, accuracy, and the fields of eval that they are about.
        self.found: Json | None = (meta or {}).get(BEST)

    def meta(self) -> Json:
        """Returns what a checkpoint holds of it."""
        return {} if self.found is None else {BEST: self.found}

    def write(self, workdir: Path) -> None:
        """Names the checkpoint in BEST_FILE, or removes that; only in process 0."""
        if jax.process_index() == 0:
            if self.found is None:
                (workdir / BEST_FILE).unlink(missing_ok=True)
            else:
                write_atomically(workdir / BEST_FILE, json.dumps(self.found, indent=2) + "\n")


class InRun:
    """Evaluates the policy that a trainer has published.

    Args:
      say: called with lines about the data.

    Raises:
      ConfigError: there is no such split, or nothing of it is held out.
    """

    def __init__(self, trainer: Trainer, say: Callable[[str], None]) -> None:
        config = trainer.config
        self.every, self._trainer = config.eval.every, trainer
        try:
            self.problems = Problems(config, trainer.tokenizer, say, trainer.warnings.append)
        except ConfigError as error:
            raise ConfigError(f"eval.every = {self.every}: {error}") from error
        check_held_out(config, self.problems.prompts, trainer.prompts, say)
        self._of = {name: getattr(config.eval, name) for name in OF}
        self.best = Best()
        shapes = trainer.sampler.engine.shapes
        if self.problems.samples == shapes.group and not trainer.sampler.greedy:
            self._at_once = shapes.sequences * shapes.shards // shapes.group
            self._sampler = copy.copy(trainer.sampler)  # with its compiled programs
        else:
            self._at_once = self.problems.at_once(sharding.shard_count(trainer.mesh))
            self._sampler = self._of_its_own(config)
        self._sampler.config = task_config(config)

    def _of_its_own(self, config: Config) -> Sampler:
        group, trainer = self.problems.samples, self._trainer
        slots = min(config.rollout.batch_size, self._at_once * group)
        config = dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, batch_size=slots))
        return Sampler(config, trainer.arch, trainer.tokenizer.stop_ids, trainer.mesh,
                       prompts=self._at_once, group=group, warn=trainer.warnings.append,
                       tokenizer=trainer.tokenizer)

    def compile(self, say: Callable[[str], None]) -> None:
        """Compiles what the trainer has not compiled: nothing where eval.samples = group_size."""
        self._sampler.follow(self._trainer.sampler)
        if not self._sampler.engine.compiled:
            self._sampler.compile(say, profile=False)
            self._sampler.engine.release()
        self._sampler.forget()

    def after(self, step: int, progress: Progress) -> Metrics:
        """Returns the metrics of an evaluation, {} where none is due after `step` steps."""
        if step % self.every:
            return {}
        began, own, theirs = time.perf_counter(), self._sampler.engine, self._trainer.sampler.engine
        before = own.control, theirs.acceptance
        self._sampler.follow(self._trainer.sampler)
        theirs.release()
        own.acceptance = theirs.acceptance
        try:
            found = self.problems.solve(self._sampler, self._at_once, progress).results()
        finally:
            own.control, theirs.acceptance = before
            own.release()
            self._sampler.forget()
        best = self.best.found
        if best is None or found["accuracy"] > best["accuracy"]:
            best = self.best.found = {"step": step, "accuracy": found["accuracy"]} | self._of
        return metrics_of(found) | {"eval/best_step": best["step"],
                                    "time/eval": time.perf_counter() - began}

    def restore(self, best: Best, say: Callable[[str], None]) -> None:
        """Goes on from the best so far; `say` gets a line if that is of another evaluation."""
        self.best, found = best, best.found
        if found is not None and {name: found[name] for name in OF} != self._of:
            best.found = None
            say(f"another evaluation than before: checkpoint {found['step']} is no longer the best")


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


def metrics_of(found: dict[str, Any]) -> Metrics:
    """Returns the metrics of an evaluation's results, see `evaluate`."""
    metrics = {"eval/accuracy": found["accuracy"], "eval/accuracy_low": found["interval"][0],
               "eval/accuracy_high": found["interval"][1],
               "eval/length_mean": found["mean_length"],
               "eval/clipped_fraction": 1 - found["stopped"],
               "eval/accept_length": found["accept_length"]}
    for k, passed in list(found["pass_at"].items())[1:]:
        metrics |= {f"eval/pass_at_{k}": passed["mean"],
                    f"eval/pass_at_{k}_low": passed["interval"][0],
                    f"eval/pass_at_{k}_high": passed["interval"][1]}
    return metrics
