"""Timing things alternately in one process, and what may be said about the outcome."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def alternate(tasks: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Calls every task once a repeat, there and back, so that a drift of the machine hits all.

    Returns:
      what each task returned, in order of the repeats: entries of equal index lie close in time.
    """
    found: dict[str, list[T]] = {name: [] for name in tasks}
    for repeat in range(repeats):
        names = list(tasks) if repeat % 2 == 0 else list(reversed(tasks))
        for name in names:
            found[name].append(tasks[name]())
    return found


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
