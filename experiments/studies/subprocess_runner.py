"""Training runs in subprocesses, so that none shares memory or compiled programs with another."""

import collections
import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TextIO

from specrl_jax.config import Config
from specrl_jax.runtime.compilation import use_persistent_cache
from specrl_jax.runtime.machine import give_back
from specrl_jax.training import run


class ProcessDied(RuntimeError):
    """The subprocess of a run was killed, usually by the kernel for lack of memory."""


def train_in_subprocess(config: Config, workdir: Path, cache: bool = True) -> None:
    """Calls `run.train` in a new process.

    Args:
      cache: whether the run may read compiled programs from the persistent cache.

    Raises:
      ConfigError: what `run.train` raises.
      ProcessDied: the process was killed; the files of the run are good.
    """
    for died in train_interleaved({"": (config, workdir)}, cache).values():
        raise died


def train_interleaved(runs: Mapping[str, tuple[Config, Path]], cache: bool = True
                      ) -> dict[str, ProcessDied]:
    """Trains each run in a process of its own; they take turns of one step while the others wait.

    So other load and changes of the machine's speed affect all runs alike. All stay in memory. The
    others go on when a process is killed.

    Args:
      runs: name -> config and workdir. With several, their names prefix the lines they print.
      cache: see `train_in_subprocess`.

    Returns:
      The runs that were killed.

    Raises:
      ConfigError: what the first failing `run.train` raises; files written so far are good.
    """
    context = multiprocessing.get_context("spawn")
    died: dict[str, ProcessDied] = {}
    with contextlib.ExitStack() as ended:
        waiting = collections.deque((name, ended.enter_context(
            concurrent.futures.ProcessPoolExecutor(1, mp_context=context))) for name in runs)
        while waiting:
            name, process = waiting.popleft()
            title = name if len(runs) > 1 else ""
            try:
                more = process.submit(run_turn, *runs[name], cache, title).result()
            except BrokenProcessPool:
                died[name] = ProcessDied(
                    "its process was killed, perhaps because memory ran out: close other programs "
                    "and run the same command again")
                continue
            if more:
                waiting.append((name, process))
            else:
                process.shutdown()
    return died


def end_with_parent() -> None:
    """Ends this process when its parent ends; a killed script would otherwise leave it waiting."""
    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# In the subprocess.

_turns: Iterator[None] | None = None


def run_turn(config: Config, workdir: Path, cache: bool, title: str) -> bool:
    """Starts the run or makes one step; returns whether steps are left."""
    global _turns
    first = _turns is None
    if first:
        end_with_parent()
        if cache:
            use_persistent_cache()
        if title:
            sys.stderr = _Titled(sys.stderr, title)
        _turns = run.training_steps(config, workdir)
    more = next(_turns, _turns) is not _turns
    if first:  # memory that compiling freed, for the other runs
        give_back()
    return more


class _Titled:
    """A stream whose lines begin with a title."""

    def __init__(self, stream: TextIO, title: str) -> None:
        self.stream, self.title, self.begun = stream, title, False

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self.stream.write(line if self.begun else f"{self.title}: {line}")
            self.begun = not line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return False  # displays of several runs would overwrite each other
