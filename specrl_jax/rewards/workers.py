"""Processes that judge answers in parallel, each within limits of CPU time and memory.

They are started at first use and speak JSON, one line an answer; `worker.py` is what they run.
"""

import json
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from specrl_jax.config import ConfigError

READY = {"ready": True}
START_SECONDS = 300  # until a worker has imported its rewards
WAITING = 20  # seconds a worker may take for each CPU second: it may sleep, or share its core


class Found(NamedTuple):
    """A term's value of one answer; `error` is what it raised, `limit` which limit it exceeded."""

    value: float = 0.0
    error: str = ""
    limit: str = ""


class Workers:
    """At most `count` processes for the rewards `names`, `seconds` of CPU for each answer."""

    def __init__(self, count: int, names: Sequence[str], seconds: float) -> None:
        self._count, self._names, self._seconds = count, names, seconds
        self._command = [sys.executable, "-m", "specrl_jax.rewards.worker", str(seconds), *names]
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def judge(self, name: str, answers: Sequence[tuple[str, str, Any]]) -> list[Found]:
        """Returns the value of each answer (prompt, completion, example), in their order."""
        with ThreadPoolExecutor(self._count) as threads:
            return list(threads.map(lambda answer: self._one(name, answer), answers))

    def _one(self, name: str, answer: tuple[str, str, Any]) -> Found:
        try:
            task = json.dumps([name, *answer[:2], dict(answer[2])])
        except TypeError as error:
            return Found(error=f"reward {name!r}: {error}; examples go to reward.workers as JSON")
        try:
            worker = self._free.get_nowait()
        except queue.Empty:
            worker = self._start()
        reply = _ask(worker, task, WAITING * self._seconds)
        if reply is None:
            return Found(limit=_ended(worker, self._seconds))
        self._free.put(worker)
        return Found(**reply)

    def _start(self) -> subprocess.Popen:
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        worker = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"})
        if _reply(worker, START_SECONDS) != READY:
            worker.kill()
            raise ConfigError(f"reward.terms: the process for {', '.join(self._names)} did not "
                              "start, see its error above")
        return worker


def _ask(worker: subprocess.Popen, task: str, seconds: float) -> Any:
    """Returns the reply to a task; None if the worker ended or is late."""
    assert worker.stdin is not None
    try:
        worker.stdin.write(task + "\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return None
    return _reply(worker, seconds)


def _reply(worker: subprocess.Popen, seconds: float) -> Any:
    assert worker.stdout is not None
    if not select.select([worker.stdout], [], [], seconds)[0]:
        return None
    line = worker.stdout.readline()
    return json.loads(line) if line else None


def _ended(worker: subprocess.Popen, seconds: float) -> str:
    """Ends a worker that has not replied; returns which limit it exceeded."""
    late = f"took over reward.seconds = {seconds:g}"
    try:
        status = worker.wait(timeout=1)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
        return late
    return late if status == -signal.SIGPROF else f"ended its process with status {status}"
