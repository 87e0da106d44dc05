"""Runs in processes of their own: none sees another's memory, caches or compiled programs."""

import concurrent.futures
import multiprocessing
from pathlib import Path

from specrl_jax.config import Config
from specrl_jax.host.compilation import use_persistent_cache
from specrl_jax.run import train


def train_apart(config: Config, workdir: Path, cache: bool = True) -> None:
    """`run.train` in a fresh process, which ends with it.

    Args:
      cache: whether programs that an earlier run compiled may be read from the persistent cache.

    Raises:
      ConfigError: what `run.train` raises.
    """
    with concurrent.futures.ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(_train, config, workdir, cache).result()


def _train(config: Config, workdir: Path, cache: bool) -> None:
    if cache:
        use_persistent_cache()
    train(config, workdir)
