"""Seconds of a step, or a rollout, by phase."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator


class StepTimer:
    """Seconds by phase: `with timer("rollout"): ...`. Phases of one name add up; `last` is the
    latest one alone."""

    def __init__(self, phase: Callable[[str], None] = lambda name: None) -> None:
        """Args: phase, called with the name of each phase when it begins."""
        self._phase, self._began = phase, time.perf_counter()
        self.last = 0.0
        self._seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._phase(name)
        began = time.perf_counter()
        yield
        self.last = time.perf_counter() - began
        self._seconds[name] += self.last

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    @property
    def total(self) -> float:
        """Seconds since the timer was made."""
        return time.perf_counter() - self._began
