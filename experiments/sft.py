"""Fine-tunes a model on chats, supervised, as a start for RL.

    python experiments/sft.py --config=smollm2 --config.data.path=chats.jsonl --workdir=runs/sft
    python experiments/train.py --config=smollm2 --config.model.path=runs/sft/model

The files have one JSON object per line: "messages", or "prompt" and "completion". The loss is that
of the assistant's messages. A step learns prompts_per_step x group_size of them, with the learner
of RL (config.learner, mesh, model). The same command again resumes; the end writes WORKDIR/model.
"""

import functools
import shutil
from pathlib import Path

import config_flags
from absl import flags
from interrupt import stops

from specrl_jax import config as config_lib
from specrl_jax import sharding
from specrl_jax.checkpoint import resume
from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.checkpoint.steps import how_to_go_on
from specrl_jax.config import Config, ConfigError, check
from specrl_jax.metrics import run_files
from specrl_jax.metrics.progress import Progress
from specrl_jax.model import weights
from specrl_jax.model.export import export
from specrl_jax.rl import supervised
from specrl_jax.rl.supervised import Supervised, Turn
from specrl_jax.runtime import lock
from specrl_jax.runtime.compilation import use_persistent_cache
from specrl_jax.runtime.digest import digest
from specrl_jax.runtime.paths import CHECKPOINTS, local_path, writing
from specrl_jax.runtime.workdir import make_workdir, result_directory, write_config

HELDOUT = flags.DEFINE_string("heldout", None, "files like data.path, whose loss is measured "
                              "before each checkpoint")


def main(config: Config, workdir: Path) -> int:
    with stops(functools.partial(how_to_go_on, workdir)):
        _fine_tune(config, workdir)
    return 0


def _fine_tune(config: Config, workdir: Path) -> None:
    """Runs or resumes the fine-tuning, and writes the model."""
    use_persistent_cache()
    sharding.all_devices()
    config = supervised.settle(config)
    results = _results(config, workdir)
    # data.path is that of the chats; eval.py reads the preset's task from what is recorded.
    described = config_lib.as_dict(config_lib.override(config, {"data.path": ""}))
    changed = resume.check_config(workdir, described, resume.EQUAL)
    source = weights.describe_source(config.model.path, family=config.model.family)
    with Progress(config.steps, 0) as progress:
        read = functools.partial(supervised.read_turns, config=config, tokenizer=source.tokenizer,
                                 say=progress.say)
        turns, heldout = read(config.data.path), read(HELDOUT.value) if HELDOUT.value else []
        progress.say(f"{config.name}: {config.steps} steps of {config.sequences} of "
                     f"{len(turns)} turns; files in {workdir}")
        trainer = Supervised(config, source, turns, heldout)
    make_workdir(workdir)
    with lock.hold(workdir), Checkpoints(
            workdir / CHECKPOINTS, config.checkpoint_keep, progress.warn) as checkpoints:
        resume.check_config(workdir, described, resume.EQUAL)
        resume.check_data(workdir, {"training": _digest(turns)} | (
            {"--heldout": _digest(heldout)} if heldout else {}))
        resumed = trainer.restore(checkpoints)
        write_config(workdir, described)
        if resumed:
            progress.say(f"resuming {workdir} after step {trainer.step_number}")
            if changed:
                progress.say(resume.describe_changes(changed))
        _run(trainer, workdir, checkpoints)
        _export(trainer, source, *results)


def _results(config: Config, workdir: Path) -> tuple[Path, Path]:
    """Returns where the model is to be, and where it is written before it replaces an older one."""
    out, new = (result_directory(workdir, name) for name in ("model", "model.new"))
    start = local_path("model.path", config.model.path).resolve()
    check(not start.is_relative_to(out.resolve()), "model.path", config.model.path, "is what this "
          "run writes; give the model that it started from, or choose another workdir")
    return out, new


def _digest(turns: list[Turn]) -> str:
    return digest(turn._asdict() for turn in turns)


def _run(trainer: Supervised, workdir: Path, checkpoints: Checkpoints) -> None:
    """Runs the remaining steps, with their metrics and checkpoints."""
    config = trainer.config
    with Progress(config.steps, trainer.step_number) as progress, run_files.Writer(
            workdir, trainer.step_number, progress.warn, config.track) as writer:
        while trainer.step_number < config.steps:
            checkpoints.check()
            record, samples = trainer.step()
            done = trainer.step_number
            diverged = trainer.bad_steps >= config.learner.max_bad_steps
            saves = diverged or done == config.steps or done % config.checkpoint_every == 0
            if saves and trainer.heldout:
                record["heldout/loss"] = trainer.heldout_loss()
            writer.write_step(record, samples)
            progress.step(record)
            if saves:
                writer.sync()
                checkpoints.save(done, trainer.arrays(), trainer.meta())
            if diverged:
                raise ConfigError(
                    f"learner.max_bad_steps = {trainer.bad_steps}: that many updates in a row were "
                    "not finite; lower learner.learning_rate and start in another workdir")


def _export(trainer: Supervised, source: weights.Source, out: Path, new: Path) -> None:
    """Writes the model; one that an earlier end of this run left there is replaced."""
    shutil.rmtree(new, ignore_errors=True)
    export(new, source.arch, trainer.weights(), source.tokenizer)
    with writing(out):
        shutil.rmtree(out, ignore_errors=True)
        new.rename(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    config_flags.run(main)
