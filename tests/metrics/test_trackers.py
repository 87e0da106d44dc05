"""Trackers: what they show, and that none of them stops a run."""

import json
import sys
import time
from collections.abc import Iterator
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

    def leaving(info: RunInfo) -> Recorder:
        raise SystemExit(4)

    def start(name: str, fails_at: int) -> Any:
        def tracker(info: RunInfo) -> Recorder:
            actual[name] = Recorder(info, fails_at)
            return actual[name]
        return tracker

    for name, tracker in (("good", start("good", -1)), ("frail", start("frail", 1)),
                          ("dead", dead), ("leaving", leaving)):
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
    write(tmp_path, 0, 4, ("dead", "leaving", "frail", "good", "jsonl"), said.append)
    assert said == ["track.to = 'dead': OSError: no such host; it shows no further steps",
                    "track.to = 'leaving': SystemExit: 4; it shows no further steps",
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


def test_unknown_tracker_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="track.to = 'mlflow': choose one of jsonl, tensorboard,"):
        trackers.resolve(TrackConfig(to=("mlflow",)))
    with pytest.raises(ConfigError, match="name each tracker once"):
        TrackConfig(to=("jsonl", "jsonl"))


def test_missing_extra_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "specrl_jax.metrics.wandb_tracker", raising=False)
    with pytest.raises(ConfigError, match=r"track.to = 'wandb': .*specrl-jax\[wandb\]"):
        trackers.resolve(TrackConfig(to=("wandb",)))


def logged(data: bytes, block: int = 2**15) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, behind W&B's header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        record += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def ended(path: Path, kind: Any) -> list[Any]:
    """Records of a run that was finished: W&B's service may write the last ones a moment later."""
    until = time.monotonic() + 60
    while True:
        records = [kind.FromString(data) for data in logged(path.read_bytes())]
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < until, f"{path} has no end"
        time.sleep(0.05)


@pytest.mark.ci
def test_wandb_offline_goes_on_with_the_same_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    write_config(tmp_path, {"name": "mine", "seed": 7})
    write(tmp_path, 0, 2, ("wandb",))
    write(tmp_path, 2, 3, ("wandb",))
    ids, losses, tables = set(), [], 0
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for record in ended(path, Record):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config = {x.key: x.value_json for x in record.run.config.update}
            for item in record.history.item:
                name = item.key or ".".join(item.nested_key)
                losses += [float(item.value_json)] if name == "loss" else []
                tables += "table-file" in item.value_json
    assert ids == {json.loads((tmp_path / "wandb.json").read_text())["id"]}
    assert losses == [0.0, 0.5, 1.0] and tables == 3 and config["seed"] == "7"
