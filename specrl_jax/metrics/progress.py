"""Progress of a run: a live display on a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from typing import TextIO

import jax
from rich.console import Console
from rich.live import Live
from rich.text import Text

from specrl_jax.structs import Metrics

LIVE_SECONDS, PLAIN_SECONDS = 0.2, 30.0
STEPS_IN_ESTIMATE = 20


def split_of_time(metrics: Metrics) -> str:
    """Returns shares of a step's time in percent: "rollout 71 learn 24 other 5"; "" if unknown."""
    total = metrics.get("time/step", 0.0)
    if not total > 0:
        return ""
    shares = {name: metrics[f"time/{name}"] for name in ("rollout", "learn", "distill")
              if f"time/{name}" in metrics}
    shares["other"] = max(total - sum(shares.values()), 0.0)
    return "time% " + " ".join(f"{name} {100 * s / total:.0f}" for name, s in shares.items())


def duration(seconds: float) -> str:
    """Returns seconds as 42s, 3m07s or 2h05m."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


def summary(metrics: Metrics) -> str:
    """Returns one line with the main metrics of a step; absent ones are left out."""
    shown = (("heldout/loss", "held-out {:.3f}"), ("reward/mean", "reward {:.3f}"),
             ("eval/accuracy", "eval {:.3f}"),
             ("rollout/tokens_per_second", "{:.0f} tok/s"),
             ("rollout/accept_length", "accept {:.2f}"), ("time/step", "{:.1f}s"))
    parts = [form.format(metrics[key]) for key, form in shown if key in metrics]
    return "  ".join(filter(None, [*parts, split_of_time(metrics)]))


class Progress:
    """Shows the progress of a run. A context manager; silent in processes other than 0."""

    def __init__(self, total_steps: int, start_step: int, stream: TextIO | None = None) -> None:
        """Args: steps of the run; complete steps; stream to write to, None is stderr."""
        self._total = total_steps
        self._done = start_step
        self._active = jax.process_index() == 0
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._seconds: deque[float] = deque(maxlen=STEPS_IN_ESTIMATE)
        self._step_start = self._rollout_shown = time.monotonic()
        self._phase = self._last = self._inside = ""
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        self._step_start = time.monotonic()
        if self._active and self._console.is_terminal:
            self._live = Live(self._line(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def resume(self, step: int) -> "Progress":
        """Sets the number of complete steps."""
        self._done = step
        return self

    def phase(self, name: str) -> None:
        """Sets the name of the current phase, shown on a terminal only."""
        self._phase, self._inside = name, ""
        self._rollout_shown = time.monotonic()
        self._refresh()

    def rollout(self, done: int, total: int, tokens: int) -> None:
        """Reports complete sequences of all, and tokens of the step; shown a few times a second."""
        now = time.monotonic()
        if now - self._rollout_shown < (LIVE_SECONDS if self._live else PLAIN_SECONDS):
            return
        self._rollout_shown = now
        self._inside = f"{done}/{total} sequences  {tokens} tokens"
        if self._live is None:
            self._print(f"step {self._done + 1}/{self._total}  rollout  {self._inside}")
        self._refresh()

    def step(self, metrics: Metrics) -> None:
        """Reports a complete step."""
        now = time.monotonic()
        self._seconds.append(now - self._step_start)
        self._step_start = self._rollout_shown = now
        self._done += 1
        self._last, self._phase, self._inside = summary(metrics), "", ""
        if self._live is None:
            self._print(str(self._line()).replace("\n", "  "))
        self._refresh()

    def say(self, text: str) -> None:
        """Prints a line."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self._print(f"WARNING: {text}", style="bold red")

    def warn_of_step(self, text: str) -> None:
        """Prints a warning that names the step that runs."""
        self.warn(f"step {self._done}: {text}")

    def _left(self) -> str:
        if not self._seconds or self._done >= self._total:
            return ""
        # The median, because the first step of a process also compiles.
        seconds = sorted(self._seconds)
        return f"left {duration(seconds[len(seconds) // 2] * (self._total - self._done))}"

    def _line(self) -> Text:
        head = [f"step {self._done}/{self._total}", self._left(), self._phase, self._inside]
        rows = ("  ".join(filter(None, head)), self._last)
        return Text("\n".join(filter(None, rows)), no_wrap=True, overflow="ellipsis")

    def _print(self, text: str, style: str = "") -> None:
        if self._active:
            self._console.print(Text(text, style))

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
