"""Judging answers in other processes, each answer within limits of CPU time and memory.

`worker.py` is what runs there. It starts at first use and speaks JSON, one line a request, so that
nothing of an answer is unpickled here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from specrl_jax.config import ConfigError

READY = {"ready": True}


class Outcome(NamedTuple):
    """A term's value of one answer; `error` is what it raised, `limit` which limit it exceeded."""

    value: float = 0.0
    error: str = ""
    limit: str = ""


class Workers:
    """At most `count` processes for the rewards `names`, `seconds` of CPU for each answer."""

    def __init__(self, count: int, names: Sequence[str], seconds: float) -> None:
        self._names = names
        self._command = [sys.executable, "-m", "specrl_jax.rewards.worker", str(count),
                         str(seconds), *names]
        self._process: subprocess.Popen | None = None

    def judge(self, name: str, answers: Sequence[tuple[str, str, Any]]) -> list[Outcome]:
        """Returns the outcome of each answer (prompt, completion, example), in their order."""
        try:
            request = json.dumps([name, [(*answer[:2], dict(answer[2])) for answer in answers]])
        except TypeError as error:
            return [Outcome(error=f"reward {name!r}: {error}; examples go to reward.workers as "
                                  "JSON")] * len(answers)
        for _ in range(2):  # if it died for a reason other than an answer, a new one starts
            self._process = self._process or self._start()
            reply = _ask(self._process, request)
            if reply is not None:
                return [Outcome(**outcome) for outcome in reply]
            status, self._process = self._process.wait(), None
        return [Outcome(limit=f"ended all workers with status {status}")] * len(answers)

    def _start(self) -> subprocess.Popen:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"})
        if _read(process) != READY:
            process.kill()
            raise ConfigError(f"reward.terms: the process for {', '.join(self._names)} did not "
                              "start, see its error above")
        return process


def _ask(process: subprocess.Popen, request: str) -> Any:
    """Returns the reply to a request; None if the process has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(request + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    return _read(process)


def _read(process: subprocess.Popen) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else None
