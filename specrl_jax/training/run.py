"""A run: RL steps with files, checkpoints and progress, resumable."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax import config as config_lib
from specrl_jax import sharding
from specrl_jax.checkpoint import resume
from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import Config, ConfigError, MeshConfig
from specrl_jax.config.tasks import RewardError
from specrl_jax.data.examples import examples_digest
from specrl_jax.data.prompts import make_prompts
from specrl_jax.metrics import run_files, trackers
from specrl_jax.metrics.progress import Progress
from specrl_jax.model import architecture, weights
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.hf_directory import SINGLE
from specrl_jax.runtime import lock
from specrl_jax.runtime.compilation import CompilationCounter
from specrl_jax.runtime.digest import digest
from specrl_jax.runtime.paths import CHECKPOINTS, local_path, output_directory
from specrl_jax.runtime.workdir import make_workdir, write_config
from specrl_jax.structs import Metrics
from specrl_jax.training.in_run import InRun, write_best
from specrl_jax.training.saving import restore, to_save
from specrl_jax.training.state import TrainState
from specrl_jax.training.trainer import Trainer

EFFICIENCY = 0.6  # of a large matrix product's speed that steps reach on a CPU


def never() -> bool:
    """Returns False."""
    return False


def train(config: Config, workdir: Path | str, stop: Callable[[], bool] = never, profile: int = 0
          ) -> bool:
    """Runs or resumes `config` in `workdir`; returns whether any step was left.

    Args:
      stop: called before each step; where it returns True, in all processes, the run is saved and
        left.
      profile: steps after the first one whose jax.profiler trace is written to workdir/profile.

    Raises:
      ConfigError: something in the configuration cannot work; the workdir is untouched.
      TrainingError: too many non-finite updates in a row.
    """
    folder = local_path("workdir", workdir)
    if profile:
        output_directory("--profile", folder / "profile", new=False)
    steps = training_steps(config, folder, stop)
    return sum(1 for _ in profiled(steps, folder / "profile", profile)) > 0


def profiled(steps: Iterator[None], folder: Path, count: int) -> Iterator[None]:
    """Yields before each step as `steps` does, and traces `count` steps into `folder`. The first
    step is not traced, because it includes work of the start."""
    tracing = False
    try:
        for number, _ in enumerate(steps):
            if number == 1 and count:
                jax.profiler.start_trace(str(folder))
                tracing = True
            elif number == 1 + count and tracing:
                jax.profiler.stop_trace()
                tracing = False
            yield
    finally:
        if tracing:
            jax.profiler.stop_trace()


def training_steps(config: Config, workdir: Path, stop: Callable[[], bool] = never
                   ) -> Iterator[None]:
    """Runs `train` as a generator, which yields before each step.

    The machine is idle there, so that several runs can take turns and be timed step by step; only
    overlapped updates of a drafter and a save may still be running.
    """
    began = time.perf_counter()
    sharding.all_devices()  # refused here rather than where JAX is first used
    wanted = config.mesh
    config = dataclasses.replace(config, mesh=sharding.choose_mesh(wanted))
    described = config_lib.as_dict(config)
    resume.check_same(described)
    resume.check_config(workdir, described, resume.EQUAL)
    trackers.resolve(config.track)
    source = weights.describe_source(config.model.path, family=config.model.family)
    progress = Progress(config.steps, 0)
    say = progress.say
    say(overview(config, source.arch, workdir))
    say_fallback(config.mesh, wanted, say)
    prompts = make_prompts(config, source.tokenizer, say)
    examples = examples_digest(prompts.examples)
    resume.check_contents(described, contents(config, source) | {
        "data.name": {"training examples": examples}})
    trainer, state = Trainer.create(config, source, prompts, say, progress.warn_of_step)
    evaluation = InRun(trainer, say, progress.warn_of_step) if config.eval.every else None
    if evaluation:
        resume.check_contents(described, {"eval.split": {
            "held-out examples": examples_digest(evaluation.problems.prompts.examples)}})
    make_workdir(workdir)
    with lock.hold(workdir), Checkpoints(
            workdir / CHECKPOINTS, config.checkpoint_keep, progress.warn) as checkpoints:
        # Once more: another run may have ended meanwhile.
        changed = resume.check_config(workdir, described, resume.EQUAL)
        resume.check_data(workdir, {"training": examples})
        resume.check_rendering(workdir, "training", prompts.texts, progress.warn)
        resumed = restore(trainer, state, checkpoints,
                          resume.renewed(changed) if changed else None, progress.warn)
        state = resumed or state
        if state.step >= config.steps:
            return
        write_config(workdir, described)
        if resumed:
            say(f"resuming {workdir} after step {state.step}")
            if changed:
                say(resume.describe_changes(changed))
        compilations = CompilationCounter()
        state, first = trainer.compile(state, say)
        if evaluation:
            state = evaluation.compile(state, say)
        write_best(workdir, state.best)
        with run_files.Writer(workdir, state.step, progress.warn, config.track
                              ) as writer, progress.resume(state.step):
            compilations.take()
            first |= {"time/startup": time.perf_counter() - began}
            steps = run_steps(Run(trainer, evaluation, checkpoints, writer, progress, compilations,
                                  stop), state, first)
            del state, resumed  # else the initial weights stay in memory
            yield from steps


def say_fallback(mesh: MeshConfig, wanted: MeshConfig, say: Callable[[str], None]) -> None:
    """Prints a line if a run has another mesh than it was given."""
    if mesh != wanted:
        say(f"mesh: {mesh.size} devices are there, so {mesh.name} of mesh.fallback replaces "
            f"{wanted.name}")


def contents(config: Config, source: weights.Source) -> dict[str, dict[str, str]]:
    """Returns digests of the models that several processes read, by the config field that names
    them; {} for one process. Of a trained head it is that of the whole file, see also
    `Source.digests`."""
    if jax.process_count() == 1:
        return {}
    digests = {"model.path": source.digests()}
    if config.rl.teacher:
        digests["rl.teacher"] = weights.describe_source(config.rl.teacher, "rl.teacher").digests()
    if config.draft.model and "draft_model" in (config.spec.drafter, *config.draft.parts):
        digests["draft.model"] = weights.describe_source(
            config.draft.model, "draft.model").digests()
    head = local_path("draft.path", config.draft.path) / SINGLE
    if config.draft.path and head.is_file():
        digests["draft.path"] = {SINGLE: digest([head.read_bytes()])}
    return digests


def overview(config: Config, arch: Architecture, workdir: Path) -> str:
    """Returns the line that a run starts with: what it does, how long that takes, and its files.

    The time is that of full-length responses at the speed of a measured matrix product, without
    start-up and the drafter's training: a rough upper bound.
    """
    speed = EFFICIENCY * config.mesh.size * matmul_speed()
    minutes = math.ceil(config.steps * step_flops(config, arch) / speed / 60)
    return (f"{config.name}: {config.steps} RL steps of {config.prompts_per_step} prompts x "
            f"{config.group_size} responses of up to {config.rollout.max_new_tokens} tokens; at "
            f"most about {minutes} min after start-up; files in {workdir}")


def step_flops(config: Config, arch: Architecture) -> float:
    """Returns the FLOPs of one step: 2 a parameter and token generated, 6 a token learned.

    The most that rl.filter may generate counts; evaluations do not.
    """
    parameters = architecture.count(architecture.describe(arch))
    learned = config.sequences * config.rollout.max_new_tokens
    generated = config.rl.most_rollouts * (
        config.prompts_per_step * config.responses * config.rollout.max_new_tokens)
    prompts = config.sequences // config.sequences_per_unit * config.rollout.max_prompt_tokens
    return parameters * (2 * generated + 6 * config.rl.updates * (learned + prompts))


def matmul_speed() -> float:
    """Returns the FLOP/s of a float32 matrix product on one device."""
    size = 1024 if jax.default_backend() == "cpu" else 4096
    product, matrix = jax.jit(jnp.matmul), jnp.ones((size, size))
    seconds = []
    for _ in range(4):  # the first compiles
        began = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


class TrainingError(ConfigError):
    """The run cannot continue; the message names the cause and the way out."""


class Run(NamedTuple):
    """What a run needs besides its state."""

    trainer: Trainer
    evaluation: InRun | None
    checkpoints: Checkpoints
    writer: run_files.Writer
    progress: Progress
    compilations: CompilationCounter
    stop: Callable[[], bool] = never  # see `train`


def run_steps(run: Run, state: TrainState, first: Metrics) -> Iterator[None]:
    """Runs the remaining steps, with their metrics, warnings and checkpoints; yields before each.

    Args:
      first: further metrics of the first step.

    Raises:
      TrainingError: too many non-finite updates in a row; a checkpoint is written first.
      RewardError: a reward failed; the same.
      CheckpointError: a checkpoint could not be written.
    """
    config, saved = run.trainer.config, state.step
    while state.step < config.steps:
        run.checkpoints.check()
        if run.stop():
            save(run, state, saved)
            return
        yield
        try:
            state, record, samples = run.trainer.step(state, run.progress.rollout,
                                                      run.progress.phase)
        except RewardError as error:
            save(run, state, saved)
            run.checkpoints.finish()
            raise _with_way_on(error, state.step) from error
        record["compilations"] = run.compilations.take()
        failure = None
        if run.evaluation:
            try:
                state, evaluated = run.evaluation.after(state, run.progress)
                record |= evaluated
            except RewardError as error:
                failure = error
        record, first = record | first, {}
        warn(record, run.progress)
        run.writer.write_step(record, samples)
        run.progress.step(record)
        diverged = state.bad_steps >= config.learner.max_bad_steps
        due = state.step == config.steps or state.step % config.checkpoint_every == 0
        if diverged or failure or due or record.get("eval/best_step") == state.step:
            first = save(run, state, saved)
            saved = state.step
        if failure:
            run.checkpoints.finish()
            raise _with_way_on(failure, saved) from failure
        if diverged:
            raise TrainingError(
                f"learner.max_bad_steps = {config.learner.max_bad_steps}: that many updates in a "
                f"row were not finite; lower learner.learning_rate and start in another workdir")


def save(run: Run, state: TrainState, saved: int) -> Metrics:
    """Begins the checkpoint of a state, unless that of step `saved` is the same; returns metrics of
    it, for the next step."""
    if saved == state.step:
        return {}
    began = time.perf_counter()
    run.writer.sync()
    arrays, meta = to_save(run.trainer, state)
    copied = run.checkpoints.save(state.step, arrays, meta, functools.partial(
        write_best, run.checkpoints.directory.parent, state.best))
    return {"time/save": time.perf_counter() - began, "memory/save_bytes": copied}


def warn(record: Metrics, progress: Progress) -> None:
    """Shows what went wrong in a step."""
    if record["compilations"]:
        progress.warn(f"{record['compilations']} compilations after warm-up")
    if not record["applied"]:
        progress.warn_of_step("loss or gradient is not finite; skipped")


def _with_way_on(error: RewardError, saved: int) -> RewardError:
    """Returns the error with what of the run is saved, and how to go on."""
    kept = f"checkpoint {saved} is saved" if saved else "no step was complete, so none is saved"
    return RewardError(f"{error}; {kept}: correct the reward and run the same command again, or "
                       f"go on with reward.on_failure=0, which must then stay in the command")
