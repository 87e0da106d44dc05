"""Runs in processes of their own: none sees another's memory, caches or compiled programs."""

import collections
import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TextIO

from specrl_jax import run
from specrl_jax.config import Config
from specrl_jax.io.compilation import use_persistent_cache
from specrl_jax.io.memory import give_back


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
    (found,) = train_by_turns({"": (config, workdir)}, cache).values()
    if isinstance(found, ProcessDied):
        raise found


def train_by_turns(runs: Mapping[str, tuple[Config, Path]], cache: bool = True
                   ) -> dict[str, float | ProcessDied]:
    """`run.train` of each in a fresh process; one starts up or makes a step while others wait.

    So what the machine does besides, and how its speed changes, meets all of them alike. All are in
    memory at once. A process that is killed holds up no other.

    Args:
      runs: name -> config and workdir. With several, what they say is led by their names.
      cache: see `train_apart`.

    Returns:
      the seconds of each one's turns, or what became of it.

    Raises:
      ConfigError: what `run.train` raises, of the first that does; what was written is good.
    """
    context = multiprocessing.get_context("spawn")
    found: dict[str, float | ProcessDied] = {}
    with contextlib.ExitStack() as ended:
        waiting = collections.deque(
            (name, 0.0, ended.enter_context(
                concurrent.futures.ProcessPoolExecutor(1, mp_context=context))) for name in runs)
        while waiting:
            name, seconds, process = waiting.popleft()
            began, title = time.perf_counter(), name if len(runs) > 1 else ""
            try:
                more = process.submit(_turn, *runs[name], cache, title).result()
            except BrokenProcessPool:
                found[name] = ProcessDied(
                    "its process was killed, perhaps because memory ran out: close other programs "
                    "and run the same command again")
                continue
            seconds += time.perf_counter() - began
            if more:
                waiting.append((name, seconds, process))
            else:
                found[name] = seconds
                process.shutdown()
    return found


def end_with_parent() -> None:
    """Ends this process when its parent does; else a killed script would leave it waiting forever,
    with all its memory."""
    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# In a run's own process.

_turns: Iterator[None] | None = None


def _turn(config: Config, workdir: Path, cache: bool, title: str) -> bool:
    """Starts up or makes a step; whether more are left."""
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
    if first:  # what compiling left is the other runs'
        give_back()
    return more


class _Titled:
    """Lines of a stream, each led by a title."""

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
