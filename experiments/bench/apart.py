"""Runs in processes of their own: none sees another's memory, caches or compiled programs."""

import concurrent.futures
import multiprocessing
import os
import threading
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from specrl_jax.config import Config
from specrl_jax.host.compilation import use_persistent_cache
from specrl_jax.run import train


class ProcessDied(RuntimeError):
    """A run's process ended without a word: as a rule the kernel killed it for its memory."""


def train_apart(config: Config, workdir: Path, cache: bool = True) -> None:
    """`run.train` in a fresh process, which ends with it.

    Args:
      cache: whether programs that an earlier run compiled may be read from the persistent cache.

    Raises:
      ConfigError: what `run.train` raises.
      ProcessDied: the process was killed; what the run has written is good.
    """
    with concurrent.futures.ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            process.submit(_train, config, workdir, cache).result()
        except BrokenProcessPool as error:
            raise ProcessDied("its process was killed, perhaps because memory ran out: close other "
                              "programs and run the same command again") from error


def end_with_parent() -> None:
    """Ends this process when its parent does; else a killed script would leave it waiting forever,
    with all its memory."""
    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _train(config: Config, workdir: Path, cache: bool) -> None:
    end_with_parent()
    if cache:
        use_persistent_cache()
    train(config, workdir)
