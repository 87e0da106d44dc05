"""Training by two processes of one machine."""

import contextlib
import itertools
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from helpers import ends, start_training

# Below those that Linux gives to connections, which could take one before a process listens on it.
# Each process that runs tests has 20 of its own.
_ports = itertools.count(10_000 + os.getpid() % 1000 * 20)


def free_port() -> int:
    """A port for a process that listens on it later."""
    while True:
        port = next(_ports)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def start_two(workdir: Path, *flags: str, own: Sequence[tuple[str, ...]] = ((), ()),
              devices: int = 1) -> list[subprocess.Popen]:
    """`start_training` in both, with further flags for each."""
    both = ("--distributed", f"--coordinator=127.0.0.1:{free_port()}", "--processes=2")
    return [start_training(workdir, *flags, *own[i], *both, f"--process={i}", devices=devices)
            for i in range(2)]


def run_two(workdir: Path, *flags: str, devices: int = 1) -> str:
    """Runs to the end; what both wrote on stderr."""
    started = start_two(workdir, *flags, devices=devices)
    told = ends(started)
    assert [process.returncode for process in started] == [0, 0], told
    return "".join(told)
