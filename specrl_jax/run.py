"""A run: RL steps with files, checkpoints and progress, resumable."""

import time
from collections.abc import Iterator
from pathlib import Path

from specrl_jax import config as config_lib
from specrl_jax.config import Config, ConfigError
from specrl_jax.io import metrics
from specrl_jax.io.checkpoint import Checkpoints
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.io.progress import Progress
from specrl_jax.trainer import Trainer


def train(config: Config, workdir: Path | str) -> bool:
    """Runs or resumes `config` in `workdir`; returns whether any step was left.

    Raises:
      ConfigError: something in the configuration cannot work; the workdir is untouched.
      TrainingError: too many non-finite updates in a row.
    """
    return sum(1 for _ in training_steps(config, Path(workdir))) > 0


def training_steps(config: Config, workdir: Path) -> Iterator[None]:
    """Runs `train` as a generator, which yields before each step.

    The machine is idle there, so that several runs can take turns and be timed step by step; only
    overlapped updates of a drafter may still be running.
    """
    began = time.perf_counter()
    metrics.check_config(workdir, config_lib.as_dict(config))
    progress = Progress(config.steps, 0)
    say = progress.say
    trainer = Trainer.from_config(config, say)
    metrics.make_workdir(workdir)
    with Checkpoints(workdir / "checkpoints", config.checkpoint_keep, progress.warn) as checkpoints:
        resumed = trainer.restore(checkpoints)
        if trainer.step_number >= config.steps:
            return
        metrics.write_config(workdir, config_lib.as_dict(config))
        if resumed:
            say(f"resuming {workdir} after step {trainer.step_number}")
        compilations = CompilationCounter()
        trainer.compile(say)
        with metrics.Writer(workdir, trainer.step_number, progress.warn) as writer, Progress(
                config.steps, trainer.step_number) as progress:
            compilations.take()
            yield from run_steps(trainer, checkpoints, writer, progress, compilations,
                                 startup(trainer, time.perf_counter() - began))


def startup(trainer: Trainer, seconds: float) -> dict[str, float]:
    """Returns metrics of the first step after a start: its seconds, and those of finding costs."""
    return {"time/startup": seconds, "time/profiling": trainer.sampler.profiling_seconds}


class TrainingError(ConfigError):
    """The run cannot continue; the message names the cause and the way out."""


def run_steps(trainer: Trainer, checkpoints: Checkpoints, writer: metrics.Writer,
              progress: Progress, compilations: CompilationCounter, first: dict[str, float]
              ) -> Iterator[None]:
    """Runs the remaining steps, with their metrics, warnings and checkpoints; yields before each.

    Args:
      first: further metrics of the first step.

    Raises:
      TrainingError: too many non-finite updates in a row; a checkpoint is written first.
    """
    config = trainer.config
    while trainer.step_number < config.steps:
        yield
        record, samples = trainer.step(progress.rollout, progress.phase)
        record["compilations"] = compilations.take()
        record, first = record | first, {}
        if record["compilations"]:
            progress.warn(f"{record['compilations']} compilations after warm-up")
        if not record["applied"]:
            progress.warn(f"step {record['step']}: loss or gradient is not finite; skipped")
        while trainer.warnings:
            progress.warn(f"step {record['step']}: {trainer.warnings.pop(0)}")
        writer.write_step(record, samples)
        progress.step(record)
        done = trainer.step_number
        stop = trainer.bad_steps >= config.learner.max_bad_steps
        if stop or done == config.steps or done % config.checkpoint_every == 0:
            writer.sync()
            checkpoints.save(done, trainer.arrays(), trainer.meta())
        if stop:
            raise TrainingError(
                f"learner.max_bad_steps = {config.learner.max_bad_steps}: that many updates in a "
                f"row were not finite; lower learner.learning_rate and start in another workdir")
