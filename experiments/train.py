"""Trains a language model by reinforcement learning with speculative rollouts.

    python experiments/train.py                              # the smollm2 preset
    python experiments/train.py --config=tiny --workdir=runs/x --config.seed=1

The same command again resumes from the last checkpoint. Ctrl-C and SIGTERM stop at once, or after a
save in flight; with --distributed, SIGTERM to any process lets all save after the step that is
running, and end.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import config_flags
import jax
from absl import flags
from interrupt import EXIT_STOPPED, stops

from specrl_jax.checkpoint.steps import how_to_go_on, list_steps
from specrl_jax.config import Config, ConfigError
from specrl_jax.metrics.report import REPORT, write_report
from specrl_jax.runtime import processes
from specrl_jax.runtime.compilation import use_persistent_cache
from specrl_jax.runtime.paths import CHECKPOINTS
from specrl_jax.training.run import train

DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes, found by jax.distributed (TPU pods, Slurm) or "
    "given by --coordinator, --processes and --process")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0")
PROCESSES = flags.DEFINE_integer("processes", None, "how many processes there are")
PROCESS = flags.DEFINE_integer("process", None, "which one this is, from 0")

PROFILE = flags.DEFINE_integer("profile", 0, "steps after the first one that are traced by "
                               "jax.profiler, into WORKDIR/profile", lower_bound=0)


class Preemption:
    """SIGTERM to a run that saves before it ends.

    Attributes:
      running: whether steps are running, so that there is something to save.
      asked: whether to save and end.
    """

    def __init__(self) -> None:
        self.running = self.asked = False

    def note(self) -> bool:
        """Notes a SIGTERM; returns False where nothing can be saved, or on the second one."""
        if self.asked or not self.running:
            return False
        self.asked = True
        return True


def _join() -> None:
    """Connects to the other processes of a distributed run."""
    given: list[Any] = [flag.value for flag in (COORDINATOR, PROCESSES, PROCESS)]
    if DISTRIBUTED.value:
        processes.join(*given)
    elif any(value is not None for value in given):
        raise ConfigError("--coordinator, --processes, --process: need --distributed")


def main(config: Config, workdir: Path) -> int:
    preemption = Preemption() if DISTRIBUTED.value else None
    saves = preemption.note if preemption else None
    with stops(functools.partial(how_to_go_on, workdir), saves), processes.ending_together():
        use_persistent_cache()
        _join()
        complete = not train(config, workdir, functools.partial(_preempted, preemption),
                             PROFILE.value)
        if preemption and preemption.asked:
            print(f"\n{how_to_go_on(workdir)}", file=sys.stderr)
            return EXIT_STOPPED
        if complete:
            print(f"{workdir}: the run is complete ({list_steps(workdir / CHECKPOINTS)[-1]} "
                  f"steps); raise --config.steps to go on, or choose another --workdir")
            if (workdir / REPORT).exists():
                return 0
        if jax.process_index() == 0:
            print(f"wrote {write_report(workdir)}")
    return 0


def _preempted(preemption: Preemption | None) -> bool:
    """Returns whether a process of the run got SIGTERM; called between steps."""
    if preemption is None:
        return False
    preemption.running = True
    stop = processes.any_of("who stops", preemption.asked)
    if stop:  # else left as it is: the signal may have come while the processes agreed
        preemption.asked = True
    return stop


if __name__ == "__main__":
    config_flags.run(main)
