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

from specrl_jax.config import Config
from specrl_jax.host.compilation import use_persistent_cache
from specrl_jax.host.report import write_report
from specrl_jax.loop import train


class Stopped(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def main(config: Config, workdir: Path) -> int:
    signal.signal(signal.SIGTERM, _stop)
    use_persistent_cache()
    try:
        if not train(config, workdir):
            print(f"{workdir}: the run is complete ({config.steps} steps); raise --config.steps "
                  f"to go on, or choose another --workdir")
            return 0
    except KeyboardInterrupt:
        print(f"\nstopped; the last checkpoint in {workdir} is good: run the same command again "
              f"to go on", file=sys.stderr)
        return 130
    print(f"wrote {write_report(workdir)}")
    return 0


if __name__ == "__main__":
    config_flags.run(main)
