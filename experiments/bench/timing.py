"""Timing tasks alternately in one process, and statistics of what was measured."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from specrl_jax.metrics.progress import duration

T = TypeVar("T")


def alternate(tasks: Mapping[str, Callable[[], T]], repeats: int,
              say: Callable[[str], None] = lambda text: None) -> dict[str, list[T]]:
    """Calls every task once per repeat; each repeat starts with the next task.

    So drift of the machine affects all tasks alike, and with three or more tasks none follows
    itself, which would find its own data in the caches.

    Args:
      say: called after each repeat, if there is more than one.

    Returns:
      What each task returned, by repeat: entries with the same index are close in time.
    """
    results: dict[str, list[T]] = {name: [] for name in tasks}
    for repeat in range(repeats):
        names, first = list(tasks), repeat % len(tasks)
        for name in names[first:] + names[:first]:
            results[name].append(tasks[name]())
        if repeats > 1:
            say(f"repeat {repeat + 1} of {repeats}")
    return results


class TimeLeft:
    """Estimates the time that is left from the pace since the start. `str` gives a phrase."""

    def __init__(self, work: float) -> None:
        self._rest, self._done, self._began = work, 0.0, time.perf_counter()

    def finished(self, work: float) -> None:
        self._rest, self._done = self._rest - work, self._done + work

    def __str__(self) -> str:
        if not self._done:
            return "time left unknown"
        pace = (time.perf_counter() - self._began) / self._done
        return f"about {duration(pace * self._rest)} left"


def seconds_of(task: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Returns the wall-clock seconds of a task; `wait` blocks until its result is ready."""
    began = time.perf_counter()
    wait(task())
    return time.perf_counter() - began


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Returns the median and the range of repeated measurements, and the measurements."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values),
            "values": list(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Returns the spread of ours / theirs, pair by pair."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])
