"""Trackers: where a run's metrics are shown in addition to metrics.jsonl.

A tracker is what `track.to` names, in process 0. None stops a run: one that raises is reported once
and gets nothing more.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specrl_jax.config import Registry, TrackConfig
from specrl_jax.structs import Json

EVENTS = "events"
SHOWN = 4  # sequences of each step in a table
COLUMNS = ("prompt_id", "sample_id", "prompt", "completion", "reward")  # of the table of samples
WALL_TIME = "time/unix"

Step = tuple[Json, Sequence[Json]]
"""The metrics of a step by name, "step" among them, and a record of each sequence."""


class RunInfo(NamedTuple):
    """What a tracker knows of the run when it starts."""

    workdir: Path
    config: Json  # as config.json holds it
    options: TrackConfig
    history: Callable[[], Iterator[Step]]  # the steps that the run has done before


class Tracker(Protocol):
    """Shows steps as they come."""

    def write(self, metrics: Json, samples: Sequence[Json]) -> None:
        """Shows a step."""
        ...

    def close(self) -> None:
        """Ends after the run's last step of this process."""
        ...


TRACKERS: Registry[Callable[[RunInfo], Tracker | None]] = Registry("track.to", Callable)


class Trackers:
    """The trackers that `track.to` names, as one. A tracker that fails is left out from then on."""

    def __init__(self, info: RunInfo, warn: Callable[[str], None]) -> None:
        self._warn, self._running = warn, dict[str, Tracker]()
        for name, start in resolve(info.options).items():
            with self._guarded(name):
                if tracker := start(info):
                    self._running[name] = tracker

    def write(self, metrics: Json, samples: Sequence[Json]) -> None:
        """Shows a step in every tracker."""
        for name, tracker in list(self._running.items()):
            with self._guarded(name):
                tracker.write(metrics, samples)

    def close(self) -> None:
        """Ends all trackers."""
        for name, tracker in list(self._running.items()):
            with self._guarded(name):
                tracker.close()

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:  # the user's, not the tracker's
            raise
        except BaseException as error:  # a service may raise anything, SystemExit too
            self._running.pop(name, None)
            self._warn(f"track.to = {name!r}: {type(error).__name__}: "
                       f"{' '.join(str(error).split())[:200]}; it shows no further steps")


def resolve(options: TrackConfig) -> dict[str, Callable[[RunInfo], Tracker | None]]:
    """Returns what starts each tracker, by name. Raises ConfigError if there is no such tracker, or
    its package is not installed."""
    return {name: TRACKERS.resolve(name) for name in options.to}


@TRACKERS.register("jsonl")
def jsonl(info: RunInfo) -> None:
    """Does nothing: metrics.jsonl and samples.jsonl are always written."""


@TRACKERS.register("tensorboard")
class TensorBoard:
    """Event files in WORKDIR/events, made anew when a run goes on: the old ones may end in a torn
    record, or hold cut steps."""

    def __init__(self, info: RunInfo) -> None:
        # Not SummaryWriter: its queue blocks for ever once its thread has died, of a full disk.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.summary import scalar, text

        place = info.workdir / EVENTS
        if place.exists():
            shutil.rmtree(place)
        place.mkdir()
        self._scalar, self._text, self._event = scalar, text, Event
        self._events = EventsWriter(str(place / "events"))
        config = f"```json\n{json.dumps(info.config, indent=2)}\n```"
        self._add(text("config", config), 0, time.time())
        for metrics, samples in info.history():
            self.write(metrics, samples)

    def write(self, metrics: Json, samples: Sequence[Json]) -> None:
        step, when = metrics["step"], metrics[WALL_TIME]
        for name, value in numbers(metrics):
            self._add(self._scalar(name, value), step, when)
        if samples:
            self._add(self._text("samples", table(samples[:SHOWN])), step, when)
        self._events.flush()

    def _add(self, summary: Any, step: int, when: float) -> None:
        self._events.write_event(self._event(summary=summary, step=step, wall_time=when))

    def close(self) -> None:
        self._events.close()


TRACKERS.register("wandb")("specrl_jax.metrics.wandb_tracker:WeightsAndBiases")


def numbers(metrics: Json) -> Iterator[tuple[str, int | float]]:
    """Yields the metrics of a step that are numbers, but for its index and time."""
    for name, value in metrics.items():
        if name not in ("step", WALL_TIME) and isinstance(value, int | float):
            yield name, value


def table(samples: Sequence[Json]) -> str:
    """Returns samples as a Markdown table."""
    def cell(value: Any) -> str:
        text = str(value).encode(errors="replace").decode()
        return " ".join(text.split()).replace("|", "\\|")

    lines = [COLUMNS, ("---",) * len(COLUMNS),
             *([cell(x.get(name)) for name in COLUMNS] for x in samples)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
