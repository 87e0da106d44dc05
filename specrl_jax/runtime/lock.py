"""A lock on a working directory, so that no two processes write the same run.

The kernel's lock on the file RUN_LOCK ends with its process, so a killed run leaves nothing to
remove. Hosts that share a file system see each other's locks where it passes on `flock`, as NFS and
most parallel file systems do; one that has no locks is refused.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock
import jax

from specrl_jax.config import ConfigError

RUN_LOCK = "run.lock"  # holds "HOST, process ID" of its owner


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Locks `workdir`, which exists, for the time of the block; process 0 does so for all.

    Raises:
      ConfigError: another process holds it, which the message names; or it cannot be locked.
    """
    if jax.process_index() != 0:
        yield
        return
    path = workdir / RUN_LOCK
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(filelock.FileLock(path, timeout=0, fallback_to_soft=False))
            stack.callback(path.unlink, missing_ok=True)
            path.write_text(f"{socket.gethostname()}, process {os.getpid()}", encoding="utf-8")
        except filelock.Timeout as error:
            raise ConfigError(f"workdir = {workdir}: in use by {_owner(path)}; end that run, or "
                              "choose another workdir") from error
        except OSError as error:
            raise ConfigError(f"workdir = {workdir}: cannot be locked ({error.strerror}); choose "
                              "another") from error
        yield


def _owner(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeError):
        return " ".join(path.read_text(encoding="utf-8").split()) or "another process"
    return "another process"
