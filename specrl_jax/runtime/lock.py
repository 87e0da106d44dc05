"""A lock on a working directory, so that no two processes write the same run.

The file RUN_LOCK names the process that holds it. The kernel's lock on that file ends with its
process, so a killed run leaves nothing to remove. It may not reach other hosts, or not exist, on a
shared file system; there the holder is taken to run while the file's time of change advances.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import jax

from specrl_jax.config import ConfigError

RUN_LOCK = "run.lock"
BEAT = 5.0  # seconds between changes of the file's time


@contextlib.contextmanager
def hold(workdir: Path, say: Callable[[str], None], beat: float = BEAT) -> Iterator[None]:
    """Locks `workdir`, which exists, for the time of the block; process 0 does so for all.

    Raises:
      ConfigError: another process holds it; the message names its host and id.
    """
    if jax.process_index() != 0:
        yield
        return
    path = workdir / RUN_LOCK
    with _locked(path, workdir, say, beat) as file:
        try:
            file.truncate(0)
            json.dump({"host": socket.gethostname(), "process": os.getpid()}, file)
            file.flush()
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(f"workdir = {workdir}: {error.strerror}; free some space, or choose "
                              "another") from error
        ended = threading.Event()
        beats = threading.Thread(target=_keep_fresh, args=(file.fileno(), ended, beat), daemon=True)
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, workdir: Path, say: Callable[[str], None], beat: float
            ) -> Iterator[TextIO]:
    """Opens and locks the file; one that its holder removed meanwhile is opened anew."""
    while True:
        try:
            file = open(path, "a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"workdir = {workdir}: {error.strerror}; choose another") from error
        with file:
            sure = _take(file, workdir)
            if not _is(path, file):
                continue
            holder = _holder(file)
            if holder and not (sure and holder.startswith(f"{socket.gethostname()}, ")):
                say(f"{workdir}: was locked by {holder}; waiting {3 * beat:.0f} s to see whether "
                    f"that still runs")
                if _changes(path, 3 * beat):
                    raise _refused(workdir, holder)
                if not _is(path, file):  # its holder ended meanwhile
                    continue
            yield file
            return


def _take(file: TextIO, workdir: Path) -> bool:
    """Locks the file; returns False where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _refused(workdir, _holder(file) or "another process") from error
    except OSError:
        return False
    return True


def _is(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _holder(file: TextIO) -> str:
    """Returns "HOST, process ID" of who wrote the file; "" if nobody did."""
    file.seek(0)
    try:
        told = json.load(file)
        return f"{told['host']}, process {told['process']}"
    except (ValueError, KeyError, TypeError):
        return ""


def _refused(workdir: Path, holder: str) -> ConfigError:
    return ConfigError(f"workdir = {workdir}: in use by {holder}; end that run, or choose another "
                       f"workdir")


def _changes(path: Path, seconds: float) -> bool:
    """Returns whether the file's time advances; clocks of hosts are not compared."""
    try:
        before = path.stat().st_mtime_ns
        time.sleep(seconds)
        return path.stat().st_mtime_ns != before
    except FileNotFoundError:  # its holder ended
        return False


def _keep_fresh(file: int, ended: threading.Event, beat: float) -> None:
    while not ended.wait(beat):
        with contextlib.suppress(OSError):  # a full disk must not end the run
            os.utime(file)
