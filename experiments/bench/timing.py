"""Timing things alternately in one process, and what may be said about the outcome."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from specrl_jax.io.progress import duration

T = TypeVar("T")
ROWS_OF_WEIGHTS = 16  # rows that take as long as reading the weights does, for estimates of time


def alternate(tasks: Mapping[str, Callable[[], T]], repeats: int,
              say: Callable[[str], None] = lambda text: None) -> dict[str, list[T]]:
    """Calls every task once a repeat, each repeat beginning with the next one.

    So a drift of the machine hits all, and of three or more none follows itself, which would warm
    its caches.

    Args:
      say: told of each repeat that is done, if there is more than one.

    Returns:
      what each task returned, in order of the repeats: entries of equal index lie close in time.
    """
    found: dict[str, list[T]] = {name: [] for name in tasks}
    for repeat in range(repeats):
        names, first = list(tasks), repeat % len(tasks)
        for name in names[first:] + names[:first]:
            found[name].append(tasks[name]())
        if repeats > 1:
            say(f"repeat {repeat + 1} of {repeats}")
    return found


class Left:
    """How long the rest of some work will take, at the pace of what was done since the start."""

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
    """Wall-clock seconds of a task; `wait` blocks until what it returned is there."""
    began = time.perf_counter()
    wait(task())
    return time.perf_counter() - began


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and range of repeated measurements, and the measurements."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values),
            "values": list(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Spread of ours / theirs, pair by pair."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])
