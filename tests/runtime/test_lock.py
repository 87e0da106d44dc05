"""A working directory has one writer, which the lock names; what a killed one left is no lock."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import HANGS

from specrl_jax.config import ConfigError
from specrl_jax.runtime import lock

HOLD = """
import sys
from pathlib import Path
from specrl_jax.runtime import lock
with lock.hold(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(workdir: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(workdir)], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def left_by(host: str, workdir: Path) -> Path:
    path = workdir / lock.RUN_LOCK
    path.write_text(json.dumps({"host": host, "process": 7}))
    return path


def test_second_writer_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"in use by {socket.gethostname()}, process "
                                              f"{process.pid}; end that run"):
            with lock.hold(tmp_path, print):
                pass
        process.communicate("", timeout=HANGS)
        with lock.hold(tmp_path, print):  # ended by itself: nothing is left
            pass
    finally:
        process.kill()
    assert os.listdir(tmp_path) == []


def test_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    assert (tmp_path / lock.RUN_LOCK).exists()
    told: list[str] = []
    with lock.hold(tmp_path, told.append):
        assert json.loads((tmp_path / lock.RUN_LOCK).read_text())["process"] == os.getpid()
    assert told == [] and os.listdir(tmp_path) == []


def test_another_host_that_ended_is_taken_over_after_a_wait(tmp_path: Path) -> None:
    left_by("elsewhere", tmp_path)
    told: list[str] = []
    with lock.hold(tmp_path, told.append, beat=0.05):
        assert socket.gethostname() in (tmp_path / lock.RUN_LOCK).read_text()
    assert len(told) == 1 and "was locked by elsewhere, process 7" in told[0]


def test_lock_removed_during_the_wait_is_made_anew(tmp_path: Path) -> None:
    path = left_by("elsewhere", tmp_path)
    with lock.hold(tmp_path, lambda text: path.unlink(), beat=0.05):
        assert json.loads(path.read_text())["process"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_another_host_that_still_runs_is_named(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_by("elsewhere", tmp_path)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: os.utime(path, (0, 0)))
    with pytest.raises(ConfigError, match="in use by elsewhere, process 7"):
        with lock.hold(tmp_path, print):
            pass
    assert json.loads(path.read_text())["host"] == "elsewhere"


def test_file_system_without_locks_goes_by_the_beat(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    def until_beaten(seconds: float, pause: Callable[[float], None] = time.sleep) -> None:
        path = tmp_path / lock.RUN_LOCK
        before = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == before:
            pause(0.01)

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    monkeypatch.setattr(lock.time, "sleep", until_beaten)
    with lock.hold(tmp_path, print, beat=0.05):
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            with lock.hold(tmp_path, print):
                pass
    assert os.listdir(tmp_path) == []


def test_lock_that_cannot_be_written_is_refused_and_left_by_nobody(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(ConfigError, match="No space left on device; free some space"):
        with lock.hold(tmp_path, print):
            pass
    assert os.listdir(tmp_path) == []
