"""A working directory has one writer, which the lock names; what a killed one left is no lock."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HANGS

from specrl_jax.config import ConfigError
from specrl_jax.runtime import lock

HOLD = """
import sys
from pathlib import Path
from specrl_jax.runtime import lock
with lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(workdir: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(workdir)], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_second_writer_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        for _ in range(2):  # a refusal leaves the holder's name as it is
            with pytest.raises(ConfigError) as refused, lock.hold(tmp_path):
                pass
            assert str(refused.value) == (
                f"workdir = {tmp_path}: in use by {socket.gethostname()}, process {process.pid}; "
                "end that run, or choose another workdir")
        process.communicate("", timeout=HANGS)
        with lock.hold(tmp_path):  # ended by itself: nothing is left
            pass
    finally:
        process.kill()
    assert os.listdir(tmp_path) == []


def test_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    assert (tmp_path / lock.RUN_LOCK).exists()
    with lock.hold(tmp_path):
        assert f"process {os.getpid()}" in (tmp_path / lock.RUN_LOCK).read_text()
    assert os.listdir(tmp_path) == []


def test_only_process_0_of_a_run_takes_the_lock(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lock.hold(tmp_path):
        monkeypatch.setattr(lock.jax, "process_index", lambda: 1)
        with lock.hold(tmp_path):
            pass
        assert os.listdir(tmp_path) == [lock.RUN_LOCK]
        monkeypatch.undo()


@pytest.mark.parametrize("call", ["fcntl.flock", "pathlib.Path.write_text"])
def test_directory_that_cannot_be_locked_is_refused_and_left_as_it_was(
        call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(call, fail)
    with pytest.raises(ConfigError, match="cannot be locked .Function not implemented.; choose"):
        with lock.hold(tmp_path):
            pass
    assert call == "fcntl.flock" or os.listdir(tmp_path) == []
