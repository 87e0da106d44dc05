"""Compiles the programs of a run in child processes, so that a crash is a finding as well."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from specrl_jax.config import Config, ConfigError, as_dict
from specrl_jax.structs import Json

from . import targets
from .findings import keep, store
from .worker import FD

COMMAND = [sys.executable, "-m", f"{__package__}.worker"]


def compile_for(config: Config, target: str, only: Sequence[str] = (), jobs: int = 1,
                folder: Path | None = None, report: Callable[[Json], None] = lambda programs: None
                ) -> Json:
    """Compiles every program of a run for a target that is not there.

    Args:
      target: such as v6e:4x4 or h100:8, see `targets.parse`.
      only: beginnings of programs' titles; () is all.
      jobs: processes that compile at once, of about 2 GB each.
      folder: of findings that are kept; None is one in the user's cache.
      report: called with the findings of each program.

    Returns:
      {"target", "config", "versions", "devices", "resident": bytes by what,
      "programs": [findings]}

    Raises:
      ConfigError: the target, the mesh on it or a value of the config cannot work.
    """
    targets.check_packages(targets.parse(target))
    request = {"config": as_dict(config), "target": target, "only": list(only), "skip": [],
               "keep": str((store() if folder is None else folder) or "")}
    workers = [_Worker(request | {"part": [i, jobs]}, report) for i in range(jobs)]
    for worker in workers:
        worker.thread.start()
    for worker in workers:
        worker.thread.join()
    for worker in workers:
        if worker.refused:
            raise ConfigError(worker.refused)
    about = workers[0].about
    order = {title: i for i, title in enumerate(about["programs"])}
    programs = sorted((one for worker in workers for one in worker.programs),
                      key=lambda one: order[one["program"]])
    return {"target": target, "config": as_dict(config), "versions": targets.versions(),
            "devices": about["devices"], "resident": about["resident"],
            "programs": programs}


class _Worker:
    """A part of the programs; the process is started again after one that ended it."""

    def __init__(self, request: Json, report: Callable[[Json], None]) -> None:
        self.request, self._report = request, report
        self.about: Json = {}
        self.refused, self.programs = "", []
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while self._once():
            pass

    def _once(self) -> bool:
        """Runs the process; returns whether there may be programs left."""
        reading, writing = os.pipe()
        with (tempfile.TemporaryFile("w+", errors="replace") as log,
              tempfile.TemporaryDirectory() as dump):
            process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(writing,),
                text=True,
                env=targets.environment(dump) | {FD: str(writing),
                                             "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
            os.close(writing)
            assert process.stdin is not None
            skip = [one["program"] for one in self.programs]
            with contextlib.suppress(BrokenPipeError):  # it has ended; its status is read below
                process.stdin.write(json.dumps(
                    self.request | {"skip": skip, "dump": dump}) + "\n")
                process.stdin.flush()  # and open: the process ends with this one
            self._listen(reading)
            code = process.wait()
            process.stdin.close()
            if code == 0 or self.refused:
                return False
            log.seek(0)
            error = {"error": _reason(code, log.read())}
        if not self._running:
            self.refused = f"target = {self.request['target']!r}: {error['error']}"
            return False
        if code == -signal.SIGABRT and self._at.get("path"):  # the same again if it ran again
            keep(Path(self._at["path"]), error)
        self._add({"program": self._running} | self._at.get("known", {}) | error)
        return True

    def _listen(self, reading: int) -> None:
        """Takes in what the process tells, until it ends."""
        self._running, self._at = "", {}
        with os.fdopen(reading, encoding="utf-8") as events:
            for line in events:
                event = json.loads(line)
                self.about = event if "programs" in event else self.about
                self.refused = event.get("refused", self.refused)
                self._at = event if "known" in event else self._at
                if "begin" in event:
                    self._running, self._at = event["begin"], {}
                if "done" in event:
                    self._running = ""
                    self._add(event["done"])

    def _add(self, program: Json) -> None:
        self.programs.append(program)
        self._report(program)


def _reason(code: int, log: str) -> str:
    """Returns what ended a process, in one line: its signal and the line that says most."""
    name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "Check failed" in line or line.startswith("F0")
               or "Error" in line]
    return f"the compiler ended ({name}): {(telling or lines or [''])[-1][:400]}"
