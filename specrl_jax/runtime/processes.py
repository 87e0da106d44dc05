"""Processes of one run: they join, share what one of them found out, and end together.

JAX gathers what they share, in arrays of two sizes, so that nothing is compiled after the first
time. A process that ends alone is missed in a collective, or by heartbeats: docs/guides/pods.md.
"""

import contextlib
import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from specrl_jax.config import ConfigError, check
from specrl_jax.runtime.stderr import say
from specrl_jax.structs import Json

T = TypeVar("T")
CHUNK = 1 << 16  # bytes that are gathered at once
SAY_AFTER = 5.0  # seconds of waiting until a line says so
PATIENCE = 300  # seconds that processes wait for each other to start
HEARTBEAT = 30  # seconds without a sign of life after which JAX counts a process as dead
GRACE = 3.0  # seconds that process 0, which hosts JAX's service, leaves the others to end
FAILED = 2  # exit status
NO_MEMORY = "RESOURCE_EXHAUSTED"  # of a device: the fault of no other process


def join(coordinator: str | None, processes: int | None, process: int | None,
         patience: float = PATIENCE) -> None:
    """Connects to the other processes.

    JAX aborts with a stack of C++ when it has waited too long, so that it gets a longer time limit
    than `patience`, in seconds. Its preemption service is off: it would take SIGTERM.

    Raises:
      ConfigError: the address is none, or the processes cannot be found.
    """
    check(coordinator is None or re.fullmatch(r".+:\d{1,5}", coordinator) is not None,
          "--coordinator", coordinator, "give HOST:PORT of process 0")
    jax.config.update("jax_enable_preemption_service", False)
    others = "the other processes" + (f" of --coordinator={coordinator}" if coordinator else "")
    late = (f"error: --distributed: {others} did not come within {patience:.0f} s; start all "
            "processes with the same --coordinator and --processes")
    try:
        with _after(SAY_AFTER, say, f"waiting for {others}"), _after(patience, _fail, late):
            jax.distributed.initialize(coordinator, processes, process,
                                       initialization_timeout=int(patience) + 3600,
                                       heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--distributed: {str(error).splitlines()[0]} Pass --coordinator, "
                          f"--processes and --process if they are not detected") from error


def _fail(line: str) -> None:
    say(line)
    os._exit(FAILED)  # a normal exit would wait for the others


@contextlib.contextmanager
def _after(seconds: float, function: Callable[[str], None], line: str) -> Iterator[None]:
    """Calls `function` if the block takes longer."""
    timer = threading.Timer(seconds, function, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Ends a process of several with one line, and at once, if it fails in the block."""
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        line = " ".join(str(error).split())
        if isinstance(error, jax.errors.JaxRuntimeError) and NO_MEMORY not in line:
            line = f"another process ended or cannot be reached ({line[:200]})"
        elif not isinstance(error, ConfigError):
            traceback.print_exc()
            line = f"{type(error).__name__}: {line}"
        time.sleep(GRACE if jax.process_index() == 0 else 0)
        _fail(f"error: {line}")


def share(name: str, value: Json) -> list[Json]:
    """Returns the `value` of every process, in their order; all must make the same calls."""
    if jax.process_count() == 1:
        return [value]
    with _after(SAY_AFTER, say, f"waiting for the other processes: {name}"):
        return [json.loads(text) for text in _gather(json.dumps(value).encode())]


def _gather(mine: bytes) -> list[bytes]:
    """Returns the bytes of every process, in their order."""
    lengths = multihost_utils.process_allgather(np.int32(len(mine)))
    padded = np.zeros(-(-int(lengths.max()) // CHUNK) * CHUNK, np.uint8)
    padded[:len(mine)] = np.frombuffer(mine, np.uint8)
    parts = [np.asarray(multihost_utils.process_allgather(padded[i : i + CHUNK]))
             for i in range(0, len(padded), CHUNK)]
    return [row[:n].tobytes() for row, n in zip(np.concatenate(parts, 1), lengths, strict=True)]


def any_of(name: str, flag: bool) -> bool:
    """Returns whether `flag` is set in any process; all must make the same calls."""
    return any(each["flag"] for each in share(name, {"flag": flag}))


def share_out(name: str, function: Callable[[Sequence[T]], Sequence[Any]], items: Sequence[T],
              whole: bool = False) -> Sequence[Any]:
    """Returns `function(items)`, computed once: each process takes a part of them.

    Args:
      function: returns a JSON value for each item; tuples come back as lists.
      whole: process 0 takes them all.

    Raises:
      ConfigError: `function` raised it, here or in another process.
    """
    count, mine = jax.process_count(), jax.process_index()
    if count == 1:
        return function(items)
    bounds = [len(items) * min(i * count if whole else i, count) // count for i in range(count + 1)]
    error, values = None, []
    try:
        values = function(items[bounds[mine] : bounds[mine + 1]])
    except ConfigError as problem:
        error = problem
    parts = share(name, {"values": values, "error": error and str(error)})
    if error is not None:
        raise error
    for other, part in enumerate(parts):
        if part["error"] is not None:
            raise ConfigError(f"process {other}: {part['error']}")
    return [value for part in parts for value in part["values"]]
