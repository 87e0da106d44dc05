"""Trackers: what they show, and that none of them stops a run."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specrl_jax.config import ConfigError, TrackConfig
from specrl_jax.metrics import run_files, trackers
from specrl_jax.metrics.trackers import RunInfo
from specrl_jax.runtime.workdir import write_config

SAMPLE = {"prompt_id": 3, "sample_id": 0, "prompt": "a | b\n", "completion": "c\ud800", "reward": 1}


class Recorder:
    """Keeps what it is shown; raises where it is told to."""

    def __init__(self, info: RunInfo, fails_at: int = -1) -> None:
        self.info, self.fails_at, self.shown, self.closed = info, fails_at, [], False

    def write(self, metrics: dict[str, Any], samples: Any) -> None:
        if metrics["step"] == self.fails_at:
            raise RuntimeError("service\nis down")
        self.shown.append((metrics["step"], metrics["loss"], len(samples)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Trackers `good`, `frail` and `dead`, which fails at once; those that were started."""
    actual: dict[str, Recorder] = {}

    def dead(info: RunInfo) -> Recorder:
        raise OSError("no such host")

    def start(name: str, fails_at: int) -> Any:
        def tracker(info: RunInfo) -> Recorder:
            actual[name] = Recorder(info, fails_at)
            return actual[name]
        return tracker

    for name, tracker in (("good", start("good", -1)), ("frail", start("frail", 1)),
                          ("dead", dead)):
        monkeypatch.setitem(trackers.TRACKERS, name, tracker)
    return actual


def write(workdir: Path, start: int, stop: int, to: tuple[str, ...], warn: Any = pytest.fail
          ) -> None:
    with run_files.Writer(workdir, start, warn, TrackConfig(to=to)) as writer:
        for step in range(start, stop):
            writer.write_step({"step": step, "loss": step / 2, "note": "x", "curve": [1.0]},
                              [SAMPLE, SAMPLE | {"sample_id": 1}])


def test_failing_tracker_is_named_once_and_others_go_on(
        made: dict[str, Recorder], tmp_path: Path) -> None:
    said: list[str] = []
    write(tmp_path, 0, 4, ("dead", "frail", "good", "jsonl"), said.append)
    assert said == ["track.to = 'dead': OSError: no such host; it shows no further steps",
                    "track.to = 'frail': RuntimeError: service is down; it shows no further steps"]
    assert made["good"].shown == [(step, step / 2, 2) for step in range(4)]
    assert made["good"].closed and not made["frail"].closed
    assert len(run_files.read_metrics(tmp_path)) == 4 and not (tmp_path / trackers.EVENTS).exists()


def test_history_is_what_a_resumed_run_has_done(
        made: dict[str, Recorder], tmp_path: Path) -> None:
    write_config(tmp_path, {"name": "x"})
    write(tmp_path, 0, 5, ("good",))
    write(tmp_path, 3, 4, ("good",))
    info = made["good"].info
    assert [(m["step"], len(samples)) for m, samples in info.history()] == [
        (step, 2) for step in range(4)]
    assert info.config["name"] == "x" and made["good"].shown == [(3, 1.5, 2)]


def test_tensorboard_shows_config_numbers_and_samples(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    write(tmp_path, 0, 2, ("tensorboard",))
    write(tmp_path, 1, 2, ("tensorboard",))
    path, = (tmp_path / trackers.EVENTS).iterdir()
    data, at, tags = path.read_bytes(), 0, []
    while at < len(data):
        size = int.from_bytes(data[at:at + 8], "little")
        event = Event.FromString(data[at + 12:at + 12 + size])
        tags += [(value.tag, event.step) for value in event.summary.value]
        at += 16 + size
    assert tags == [("config/text_summary", 0), ("loss", 0), ("samples/text_summary", 0),
                    ("loss", 1), ("samples/text_summary", 1)]
    assert trackers.table([SAMPLE]).splitlines()[-1] == r"| 3 | 0 | a \| b | c? | 1 |"


def test_full_disk_ends_tensorboard_and_not_the_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboardX.record_writer import RecordWriter

    write(tmp_path, 0, 1, ("tensorboard",))
    said = []
    monkeypatch.setattr(RecordWriter, "write", full)
    write(tmp_path, 1, 40, ("tensorboard",), said.append)
    assert len(said) == 1 and "track.to = 'tensorboard': OSError: " in said[0]


def full(self: object, data: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_tracker_that_cannot_be_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "specrl_jax.metrics.wandb_tracker", raising=False)
    for names, words in (("wandb",), r"track.to = 'wandb': .*specrl-jax\[wandb\]"), (
            ("mlflow",), "track.to = 'mlflow': choose one of jsonl, tensorboard,"), (
            ("jsonl", "jsonl"), "name each tracker once"):
        with pytest.raises(ConfigError, match=words):
            trackers.resolve(TrackConfig(to=names))


@pytest.mark.ci
def test_wandb_offline_goes_on_with_the_same_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_config(tmp_path, {"name": "mine", "seed": 7})
    write(tmp_path, 0, 2, ("wandb",))
    write(tmp_path, 2, 3, ("wandb",))
    run = json.loads((tmp_path / "wandb.json").read_text())["id"]
    logs, until = sorted(tmp_path.glob(f"wandb/offline-run-*-{run}/*.wandb")), time.monotonic() + 60
    losses = set()
    while losses != {b"0", b"0.5", b"1"}:  # W&B's service may write the last a moment later
        assert len(logs) == 2 and time.monotonic() < until, losses
        time.sleep(0.05)
        data = b"".join(path.read_bytes() for path in logs)
        losses = {*re.findall(rb"\x04loss\x82\x01.([\d.]+)", data)}
    assert data.count(b"table-file") >= 3 and b"mine" in data
