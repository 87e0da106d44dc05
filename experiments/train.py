"""Trains a language model by reinforcement learning with speculative rollouts.

    python experiments/train.py                              # the smollm2 preset
    python experiments/train.py --config=tiny --workdir=runs/x --config.seed=1

The same command again resumes from the last checkpoint. Ctrl-C and SIGTERM stop at once.
"""

import signal
import sys
from pathlib import Path
from types import FrameType

import config_flags
import jax
from absl import flags

from specrl_jax.config import Config
from specrl_jax.host.compilation import use_persistent_cache
from specrl_jax.host.report import write_report
from specrl_jax.loop import train

DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes, found by jax.distributed (TPU pods, Slurm) or "
    "given by the three flags below")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0")
PROCESSES = flags.DEFINE_integer("processes", None, "how many processes there are")
PROCESS = flags.DEFINE_integer("process", None, "which one this is, from 0")


class Stopped(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def main(config: Config, workdir: Path) -> int:
    signal.signal(signal.SIGTERM, _stop)
    use_persistent_cache()
    if DISTRIBUTED.value:
        jax.distributed.initialize(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    try:
        if not train(config, workdir):
            print(f"{workdir}: the run is complete ({config.steps} steps); raise --config.steps "
                  f"to go on, or choose another --workdir")
            return 0
    except KeyboardInterrupt:
        print(f"\nstopped; the last checkpoint in {workdir} is good: run the same command again "
              f"to go on", file=sys.stderr)
        return 130
    if jax.process_index() == 0:
        print(f"wrote {write_report(workdir)}")
    return 0


if __name__ == "__main__":
    config_flags.run(main)
