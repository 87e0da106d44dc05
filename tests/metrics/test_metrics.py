"""A run's files: what a resumed run cuts, keeps and refuses."""

import json
import math
import os
import struct

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from specrl_jax.config import ConfigError
from specrl_jax.metrics import run_files as M
from specrl_jax.metrics.trackers import EVENTS
from specrl_jax.runtime.workdir import METRICS, SAMPLES, result_directory, write_config


def sample(step, index):
    return {"prompt_id": index // 2, "sample_id": index % 2, "prompt": "1+1=\n", "tokens": 2,
            "completion": f"{step} é\u2028\ud800\n", "reward": 1.0, "commits": [1, 2]}


def write(workdir, start, stop, warn=None):
    with M.Writer(workdir, start, **({"warn": warn} if warn else {})) as writer:
        for step in range(start, stop):
            writer.write_step({"step": step, "loss": step / 10},
                              [sample(step, i) for i in range(3)])


def steps(workdir):
    """(steps of metrics.jsonl, of samples.jsonl, of the events of "loss")."""
    return ([r["step"] for r in M.read_metrics(workdir)],
            [r["step"] for r in M.read_samples(workdir)],
            [step for step, _ in events(workdir, "loss")])


def expected(stop):
    return list(range(stop)), [s for s in range(stop) for _ in range(3)], list(range(stop))


def events(workdir, tag):
    """(step, value) in every event file below `workdir`, from the TFRecord bytes."""
    out = []
    for path in sorted(workdir.rglob("*tfevents*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size, = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12:at + 12 + size])
            out += [(event.step, v.simple_value) for v in event.summary.value if v.tag == tag]
            at += 16 + size
    return out


def test_lines_come_back(tmp_path):
    write(tmp_path, 0, 2)
    assert steps(tmp_path) == expected(2)
    assert next(M.read_samples(tmp_path)) == {"step": 0} | sample(0, 0)
    assert M.read_metrics(tmp_path)[1]["loss"] == 0.1
    assert events(tmp_path, "loss") == [(0, 0.0), (1, pytest.approx(0.1))]
    assert events(tmp_path, M.WALL_TIME) == events(tmp_path, "step") == []


@pytest.mark.parametrize("resume", [0, 1, 3, 5])
def test_resuming_cuts_what_lies_beyond_the_checkpoint(tmp_path, resume):
    write(tmp_path, 0, 5)
    event_file, = (tmp_path / EVENTS).iterdir()
    event_file.rename(event_file.with_name("events.out.tfevents.1.another-host"))
    before = M.read_metrics(tmp_path)
    lines = []
    write(tmp_path, resume, resume, warn=lines.append)
    assert steps(tmp_path) == expected(resume) and lines == []
    assert M.read_metrics(tmp_path) == before[:resume]
    write(tmp_path, resume, 7)
    assert steps(tmp_path) == expected(7)


@pytest.mark.parametrize("name", [METRICS, SAMPLES])
def test_cut_removes_a_line_torn_anywhere(tmp_path, name):
    write(tmp_path, 0, 3)
    whole = (tmp_path / name).read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(last, len(whole)):
        (tmp_path / name).write_bytes(whole[:end])
        M.cut(tmp_path / name, 3)
        assert (tmp_path / name).read_bytes() == whole[:last]


def test_torn_last_line_is_ignored_and_a_broken_one_refused(tmp_path):
    write(tmp_path, 0, 3)
    path = tmp_path / METRICS
    whole = path.read_text()
    path.write_text(whole[:-10])
    assert [r["step"] for r in M.read_metrics(tmp_path)] == [0, 1]
    path.write_text(whole.replace('"step": 1', '"step" 1'))
    with pytest.raises(ConfigError, match="metrics.jsonl: line 2 is broken"):
        M.read_metrics(tmp_path)


def test_missing_lines_are_reported(tmp_path):
    write(tmp_path, 0, 3)
    lines = []
    write(tmp_path, 5, 6, warn=lines.append)
    assert len(lines) == 2 and "metrics.jsonl lacks steps" in lines[0] and "3 of 5" in lines[0]


def test_cut_that_dies_leaves_the_file_whole(tmp_path, monkeypatch):
    write(tmp_path, 0, 3)
    before = (tmp_path / SAMPLES).read_bytes()

    def die(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        M.cut(tmp_path / SAMPLES, 1)
    assert (tmp_path / SAMPLES).read_bytes() == before


@pytest.mark.parametrize("step", [1, 3])
def test_steps_are_neither_skipped_nor_repeated(tmp_path, step):
    with M.Writer(tmp_path, 0) as writer:
        writer.write_step({"step": 0}, [])
        writer.write_step({"step": 1}, [])
        with pytest.raises(ValueError, match=f"step {step} where step 2 is next"):
            writer.write_step({"step": step}, [])
    assert [r["step"] for r in M.read_metrics(tmp_path)] == [0, 1]


def test_lines_are_on_disk_when_the_step_returns(tmp_path):
    writer = M.Writer(tmp_path, 0)
    writer.write_step({"step": 0, "loss": 0.5}, [sample(0, i) for i in range(3)])
    assert steps(tmp_path)[:2] == expected(1)[:2]
    writer.close()
    assert steps(tmp_path) == expected(1)


def test_value_that_is_not_finite_is_json_and_comes_back(tmp_path):
    with M.Writer(tmp_path, 0) as writer:
        writer.write_step({"step": 0, "loss": math.nan, "kl": -math.inf, "lr": 0.5},
                          [sample(0, 0) | {"reward": np.float32("nan"), "tokens": np.array([1])}])
    raw = json.loads((tmp_path / METRICS).read_text(), parse_constant=pytest.fail)
    assert raw["loss"] is None and raw["nonfinite"] == {"loss": "nan", "kl": "-inf"}
    record, = M.read_metrics(tmp_path)
    assert math.isnan(record["loss"]) and record["kl"] == -math.inf and "nonfinite" not in record
    row = next(M.read_samples(tmp_path))
    assert math.isnan(row["reward"]) and row["tokens"] == [1]
    write(tmp_path, 1, 1)
    assert math.isnan(events(tmp_path, "loss")[0][1])


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write(tmp_path / "w", 0, 2)
    write_config(tmp_path / "w", {})
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("what", ["file", "directory", "link to nothing"])
def test_result_directory_of_no_run_is_refused(tmp_path, what):
    """What a run writes at its end replaces what it wrote before, and nothing else."""
    assert result_directory(tmp_path, "model") == tmp_path / "model"
    {"file": lambda path: path.touch(), "directory": lambda path: path.mkdir(),
     "link to nothing": lambda path: path.symlink_to("nowhere")}[what](tmp_path / "model")
    with pytest.raises(ConfigError, match="workdir = .*/model exists already and was not written"):
        result_directory(tmp_path, "model")
    write_config(tmp_path, {})
    if what == "directory":
        assert result_directory(tmp_path, "model") == tmp_path / "model"
    else:
        with pytest.raises(ConfigError, match="was not written by a run"):
            result_directory(tmp_path, "model")
