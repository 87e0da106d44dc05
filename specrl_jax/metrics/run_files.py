"""The files of a run's working directory.

    config.json     the resolved configuration
    best.json       step and accuracy of the best evaluation, see training/in_run.py
    data.json       hashes of the examples and rendered prompts that the run was started with
    metrics.jsonl   one object a step
    samples.jsonl   one object a sequence
    events/         TensorBoard, made from the two; see trackers.py for others

`step` counts from 0. A step's line is written when the step is complete, and a checkpoint at step k
holds the effect of the steps 0 .. k-1. A run that resumes from it cuts all later lines, so no line
is missing or doubled after any number of kills. JSON has no NaN or infinity: such values are null,
and their spelling under "nonfinite" is put back by the readers here.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import reprlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specrl_jax.config import ConfigError, TrackConfig
from specrl_jax.metrics.trackers import WALL_TIME, RunInfo, Step, Trackers
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.paths import writing
from specrl_jax.runtime.stderr import warn as loud
from specrl_jax.runtime.workdir import CONFIG, METRICS, SAMPLES, read_object
from specrl_jax.structs import Json

NONFINITE = "nonfinite"


def encode(record: Json) -> str:
    """Returns one JSON line; numpy and jax values become plain ones, non-finite ones null."""
    plain = {key: _python(value) for key, value in record.items()}
    bad = {key: str(value) for key, value in plain.items()
           if isinstance(value, float) and not math.isfinite(value)}
    if bad:
        plain |= dict.fromkeys(bad) | {NONFINITE: bad}
    return json.dumps(plain, allow_nan=False) + "\n"


def decode(line: str) -> Json:
    """Returns the record of a line of `encode`; raises ValueError if it is not a whole record."""
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("not an object with an integer step")
    return record | {key: float(value) for key, value in record.pop(NONFINITE, {}).items()}


def _python(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray | jax.Array) else value


def _records(path: Path) -> Iterator[tuple[str, Json | None]]:
    """Yields (line, record); the record is None if the line is broken."""
    try:
        file = open(path, encoding="utf-8", errors="replace", newline="\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); restore it from a copy, or "
                          f"choose another workdir") from error
    with file:
        for line in file:
            try:
                yield line, decode(line) if line.endswith("\n") else None
            except (ValueError, TypeError, AttributeError, RecursionError):
                yield line, None


def read_metrics(workdir: str | Path) -> list[Json]:
    """Returns the objects of metrics.jsonl in order, without a line that is still being written.
    Raises ConfigError if a line is broken."""
    return list(_read(Path(workdir) / METRICS))


def read_samples(workdir: str | Path) -> Iterator[Json]:
    """Yields the objects of samples.jsonl, as `read_metrics` returns those of metrics.jsonl."""
    return _read(Path(workdir) / SAMPLES)


def check_sample(workdir: str | Path, sample: Json, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError unless a sequence's record has these fields, of these types."""
    for name, kinds in fields.items():
        if not isinstance(sample.get(name), kinds):
            raise ConfigError(f"{Path(workdir) / SAMPLES}: {name!r} is missing in step "
                              f"{sample['step']}, or of another type: "
                              f"{reprlib.repr(sample.get(name))}")


def _read(path: Path) -> Iterator[Json]:
    for number, (line, record) in enumerate(_records(path), 1):
        if record is not None:
            yield record
        elif line.endswith("\n"):
            raise ConfigError(f"{path}: line {number} is broken: {line[:60]!r}; resuming the run "
                              f"drops it, or restore the file from a copy")


def cut(path: Path, step: int) -> list[int]:
    """Removes the lines of `step` and of later steps from a file, and broken lines; returns the
    distinct steps that are left, in the file's order."""
    steps: dict[int, None] = {}

    def kept() -> Iterator[str]:
        for line, record in _records(path):
            if record is not None and record["step"] < step:
                steps[record["step"]] = None
                yield line

    write_atomically(path, kept())
    return list(steps)


class Writer:
    """Appends steps to the files of `workdir`. Processes other than 0 write nothing."""

    def __init__(self, workdir: str | Path, resume_step: int,
                 warn: Callable[[str], None] = loud, track: TrackConfig | None = None) -> None:
        """Cuts the files to the steps before `resume_step`, the restored checkpoint's; 0 empties
        them. Calls `warn` if lines of earlier steps are missing, or a tracker fails.

        Raises:
          ConfigError: `track`, TrackConfig() where it is None, names a tracker that there is not.
        """
        self._active = jax.process_index() == 0
        self._next = resume_step
        if not self._active:
            return
        self._workdir = Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, SAMPLES):
            steps = cut(self._workdir / name, resume_step)
            if steps != list(range(resume_step)):
                warn(f"{self._workdir / name} lacks steps that checkpoint {resume_step} follows: "
                     f"it has {len(steps)} of {resume_step}")
        self._metrics, self._samples = (
            open(self._workdir / name, "a", encoding="utf-8", newline="\n")
            for name in (METRICS, SAMPLES))
        self._trackers = Trackers(RunInfo(
            self._workdir, read_object(self._workdir / CONFIG) or {}, track or TrackConfig(),
            functools.partial(_history, self._workdir)), warn)

    def write_step(self, metrics: Json, samples: list[Json]) -> None:
        """Writes one step's metrics by name, and one dict for each sequence, to which "step" is
        added. Raises ValueError if metrics["step"] is not the next step."""
        step = int(metrics["step"])
        if step != self._next:
            raise ValueError(f"metrics of step {step} where step {self._next} is next")
        self._next += 1
        if not self._active:
            return
        metrics = metrics | {"step": step, WALL_TIME: time.time()}
        line = encode(metrics)
        lines = "".join(encode({"step": step} | sample) for sample in samples)
        for file, text in ((self._samples, lines), (self._metrics, line)):
            with writing(Path(file.name)):
                file.write(text)
                file.flush()
        self._trackers.write({name: _python(x) for name, x in metrics.items()}, samples)

    def sync(self) -> None:
        """Makes all lines durable. Call it before writing a checkpoint, which must not be ahead."""
        if self._active:
            for file in (self._metrics, self._samples):
                with writing(Path(file.name)):
                    file.flush()
                    os.fsync(file.fileno())

    def close(self) -> None:
        """Syncs and closes the files."""
        if self._active:
            self.sync()
            self._metrics.close()
            self._samples.close()
            self._trackers.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        # An error while closing must not hide the error that ended the run.
        with contextlib.suppress(OSError, ConfigError) if kind else contextlib.nullcontext():
            self.close()


def _history(workdir: Path) -> Iterator[Step]:
    """Yields the metrics and samples of each step in the files."""
    groups = itertools.groupby(
        (record for _, record in _records(workdir / SAMPLES) if record is not None),
        key=lambda record: record["step"])
    step, part = -1, iter(())
    for _, record in _records(workdir / METRICS):
        if record is not None:
            while step < record["step"]:
                step, part = next(groups, (math.inf, iter(())))
            yield record, list(part) if step == record["step"] else []
