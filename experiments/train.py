"""Trains a language model by reinforcement learning with speculative rollouts.

    python experiments/train.py                              # the smollm2 preset
    python experiments/train.py --config=tiny --workdir=runs/x --config.seed=1

The same command again resumes from the last checkpoint. Ctrl-C and SIGTERM stop at once.
"""

import functools
from pathlib import Path
from typing import Any

import config_flags
import jax
from absl import flags
from interrupt import stops

from specrl_jax.config import Config, ConfigError
from specrl_jax.io.checkpoint import list_steps
from specrl_jax.io.compilation import use_persistent_cache
from specrl_jax.io.report import REPORT, write_report
from specrl_jax.run import train

DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes, found by jax.distributed (TPU pods, Slurm) or "
    "given by --coordinator, --processes and --process")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0")
PROCESSES = flags.DEFINE_integer("processes", None, "how many processes there are")
PROCESS = flags.DEFINE_integer("process", None, "which one this is, from 0")

PROFILE = flags.DEFINE_integer("profile", 0, "steps after the first one that are traced by "
                               "jax.profiler, into WORKDIR/profile", lower_bound=0)


def _join() -> None:
    """Connects to the other processes of a distributed run."""
    given: list[Any] = [flag.value for flag in (COORDINATOR, PROCESSES, PROCESS)]
    if not DISTRIBUTED.value:
        if any(value is not None for value in given):
            raise ConfigError("--coordinator, --processes, --process: need --distributed")
        return
    try:
        jax.distributed.initialize(*given)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--distributed: {str(error).splitlines()[0]} Give --coordinator, "
                          f"--processes and --process where they cannot be found") from error


def main(config: Config, workdir: Path) -> int:
    with stops(functools.partial(_how_to_go_on, workdir)):
        use_persistent_cache()
        _join()
        if not train(config, workdir, PROFILE.value):
            print(f"{workdir}: the run is complete ({list_steps(workdir / 'checkpoints')[-1]} "
                  f"steps); raise --config.steps to go on, or choose another --workdir")
            if (workdir / REPORT).exists():
                return 0
        if jax.process_index() == 0:
            print(f"wrote {write_report(workdir)}")
    return 0


def _how_to_go_on(workdir: Path) -> str:
    steps = list_steps(workdir / "checkpoints")
    kept = f"checkpoint {steps[-1]} is good" if steps else "there is no checkpoint yet"
    return f"stopped; {kept}: run the same command again to go on"


if __name__ == "__main__":
    config_flags.run(main)
