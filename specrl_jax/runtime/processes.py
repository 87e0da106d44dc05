"""Processes of one run: they join, share what one of them found out, and end together.

JAX's coordination service carries the messages, so that nothing is compiled for them and a wait can
say for whom. A process that fails tells the others, which then end with its line instead of waiting
for it in a collective. Of one that is killed JAX tells them, see docs/guides/pods.md.
"""

import atexit
import collections
import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax._src import distributed  # has no public counterpart; Orbax uses it, too
from jax.extend.backend import clear_backends

from specrl_jax.config import ConfigError, check
from specrl_jax.structs import Json

T = TypeVar("T")
ENDED = "specrl_jax/ended"  # key of the line that all processes end with
POLL = 1.0  # seconds between looks at it
READ = "specrl_jax/read"  # keys of the processes that end with it
GRACE = 10.0  # seconds that process 0, which hosts the service, waits for them at most
SAY_AFTER, SAY_EVERY = 5.0, 60.0  # seconds of waiting until a line says for whom
PATIENCE = 300  # seconds that processes wait for each other to start
HEARTBEAT = 30  # seconds without a sign of life after which JAX counts a process as dead
FAILED = 2  # exit status
NO_MEMORY = "RESOURCE_EXHAUSTED"  # of a device: the fault of no other process
_ending = threading.Lock()  # held by the thread that ends this process
_rounds = collections.defaultdict[str, Iterator[int]](itertools.count)  # messages so far, by name


def loud(text: str) -> None:
    """Prints a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def join(coordinator: str | None, processes: int | None, process: int | None,
         patience: float = PATIENCE) -> None:
    """Connects to the other processes, and ends this one whenever one of them fails.

    JAX aborts with a stack of C++ when it has waited too long, so that it gets a longer time limit
    than `patience`, in seconds. Its preemption service is off: it would take SIGTERM.

    Raises:
      ConfigError: the address is none, or the processes cannot be found.
    """
    check(coordinator is None or re.fullmatch(r".+:\d{1,5}", coordinator) is not None,
          "--coordinator", coordinator, "give HOST:PORT of process 0")
    config: Any = jax.config
    config.update("jax_enable_preemption_service", False)
    joined = threading.Event()
    threading.Thread(target=_say_who_is_missing, args=(joined, patience), daemon=True).start()
    try:
        jax.distributed.initialize(coordinator, processes, process,
                                   initialization_timeout=int(patience) + 3600,
                                   heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--distributed: {str(error).splitlines()[0]} Give --coordinator, "
                          f"--processes and --process where they cannot be found") from error
    finally:
        joined.set()
    left = threading.Event()
    watching = threading.Thread(target=_end_with_the_others, args=(left,), daemon=True)
    watching.start()
    atexit.register(_leave, left, watching)


def _leave(left: threading.Event, watching: threading.Thread) -> None:
    """Shuts JAX down, which waits for the other processes, and then ends the thread that watches
    them. Were it in C++ when Python ends its threads, that would abort a process that is done."""
    try:
        clear_backends()  # first, as JAX does
        jax.distributed.shutdown()
    finally:
        left.set()
        watching.join()


def _say_who_is_missing(joined: threading.Event, patience: float) -> None:
    waited = 0.0  # counted in pauses, so that a slow machine says the same
    while waited < patience:
        pause = min(SAY_EVERY if waited else SAY_AFTER, patience - waited)
        if joined.wait(pause):
            return
        waited += pause
        if waited < patience:
            loud(f"waiting for {_missing()}")
    loud(f"error: --distributed: {_missing()} did not come within {patience:.0f} s; start "
         f"all processes with the same --coordinator and --processes")
    os._exit(FAILED)


def _missing() -> str:
    """Returns whom this process waits for, as far as it can tell."""
    state = distributed.global_state
    address, count = state.coordinator_address or "an unknown address", state.num_processes
    if state.process_id == 0:
        others = "process 1" if count == 2 else f"some of the processes 1 to {count - 1}"
        return f"{others} to connect to {address}"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError):
        return f"process 0, which does not answer at {address}"
    return f"the others of {count} processes; process 0 answers at {address}"


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None, "several processes need jax.distributed.initialize"
    return client


def _end_with_the_others(left: threading.Event) -> None:
    while not left.wait(POLL):
        if (client := distributed.global_state.client) is not None:
            _end_if_told(client)


def _end_if_told(client: Any) -> None:
    """Ends this process with the line of another one that has failed; one thread does."""
    line = mine = f"process {distributed.global_state.process_id}: "  # asks no backend: it may wait
    with _ending:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody has failed
            line = client.key_value_try_get(ENDED)
        if not line.startswith(mine):
            loud(f"error: {line}")
            _let_others_read()
            os._exit(FAILED)  # a normal exit would wait for the others


def _let_others_read() -> None:
    """Says that this process ends; process 0 waits until all others have said so."""
    state, client, until = distributed.global_state, _client(), time.monotonic() + GRACE
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is said, or one of them is gone
        if state.process_id != 0:
            client.key_value_set(f"{READ}/{state.process_id}", "yes")
            return
        for other in range(1, state.num_processes):
            left = max(until - time.monotonic(), 0.001)
            client.blocking_key_value_get(f"{READ}/{other}", int(1000 * left))


def announce(line: str) -> None:
    """Tells all other processes, if there are any, to end with this line."""
    state = distributed.global_state
    if state.client is not None and state.num_processes > 1:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first
            _client().key_value_set(ENDED, f"process {state.process_id}: {line}")
        _let_others_read()


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Ends all processes with one line if this one fails in the block."""
    try:
        yield
    except Exception as error:
        if distributed.global_state.client is None or distributed.global_state.num_processes == 1:
            raise
        line = " ".join(str(error).split())
        lost = isinstance(error, jax.errors.JaxRuntimeError) and NO_MEMORY not in line
        if lost:  # a collective lost one of the others, which has said why before it ended
            _end_if_told(_client())
            line = f"another process ended or cannot be reached ({line[:200]})"
        elif not isinstance(error, ConfigError):
            traceback.print_exc()
            line = f"{type(error).__name__}: {line}"
        loud(f"error: {line}")
        announce(line)
        os._exit(FAILED)


def share(name: str, value: Json) -> list[Json]:
    """Returns the `value` of every process, in their order; all must make the same calls.

    A line says for whom it waits if that takes long.
    """
    if jax.process_count() == 1:
        return [value]
    mine, client, number = jax.process_index(), _client(), next(_rounds[name])
    client.key_value_set(f"specrl_jax/{name}/{number}/{mine}", json.dumps(value))
    if number >= 2:  # all have set number - 1, so none still reads number - 2
        client.key_value_delete(f"specrl_jax/{name}/{number - 2}/{mine}")
    return [value if other == mine else json.loads(_wait_for(name, number, other))
            for other in range(jax.process_count())]


def _wait_for(name: str, number: int, other: int) -> str:
    pause = SAY_AFTER
    while True:
        try:
            return _client().blocking_key_value_get(f"specrl_jax/{name}/{number}/{other}",
                                                    int(1000 * pause))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        loud(f"waiting for process {other}: {name}")
        pause = SAY_EVERY


def any_of(name: str, flag: bool) -> bool:
    """Returns whether `flag` is set in any process; all must make the same calls."""
    return any(told["flag"] for told in share(name, {"flag": flag}))


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
    bounds = [len(items) * min(i * count if whole else i, count) // count
              for i in range(count + 1)]
    error, found = None, []
    try:
        found = function(items[bounds[mine] : bounds[mine + 1]])
    except ConfigError as problem:
        error = problem
    told = share(name, {"found": found, "error": error and str(error)})
    if error is not None:
        raise error
    for other, part in enumerate(told):
        if part["error"] is not None:
            raise ConfigError(f"process {other}: {part['error']}")
    return [value for part in told for value in part["found"]]
