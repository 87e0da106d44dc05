"""Launches become metrics, a table and figures."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import explain
from specrl_jax.io import launches
from specrl_jax.io.metrics import encode, write_config
from specrl_jax.io.report import write_report


def launch(seconds: float, **changes: Any) -> dict[str, Any]:
    return {"batch": 8, "seconds": seconds, "live": 8.0, "context": 40.0, "steps": 2.0,
            "width": 16.0, "drafting": 1.0, "switches": 1.0, "tokens": 20.0,
            "predicted_tokens": 19.0, "predicted_seconds": 0.5, "spent_seconds": 0.1,
            "off_seconds": 1.0, "fixed_seconds": 0.7, "fixed_steps": 3.0,
            "launch_rounds": 4.0, "branch": 2.0, "nodes": 2.5, "lag": 1.25, "trial": 0.0} | changes


TRACE = [launch(0.5), launch(0.8, steps=0.0, launch_rounds=12.0, audit_off_seconds=0.02,
                             audit_off_tokens=8, audit_fixed_seconds=0.03, audit_fixed_tokens=12)]


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    write_config(tmp_path, {"name": "made up"})
    rows = [{"step": step, "reward/mean": 0.5, "time/rollout": 1.4} | launches.summary(TRACE)
            for step in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(map(encode, rows)))
    sample = {"prompt_id": 0, "sample_id": 0, "prompt": "a", "completion": "b", "tokens": [1],
              "reward": 1.0}
    (tmp_path / "samples.jsonl").write_text("".join(
        json.dumps({"step": step} | sample) + "\n" for step in range(2)))
    return tmp_path


def test_sums_of_launches() -> None:
    found = launches.summary(TRACE)
    assert found["control/draft_depth"] == pytest.approx(2 * 4 / 16)
    assert found["time/saved"] == pytest.approx(2.0 - 1.3)
    assert found["time/regret"] == pytest.approx(0.1)
    assert found["time/control_error"] == pytest.approx(0.3 / 1.3)
    assert launches.recorded(found)[1]["audit_fixed_tokens"] == 12
    assert launches.summary([{"batch": 8, "seconds": 0.1}]) == launches.summary([]) == {}
    many = launches.summary([launch(0.1)] * (launches.MOST + 5))
    assert len(many[launches.LAUNCHES]) == launches.MOST and many["time/saved"] > 400


def test_steps_and_launches_are_shown(workdir: Path, capsys: Any) -> None:
    assert explain.main([str(workdir)]) == 0
    out = capsys.readouterr().out
    assert "+0.7" in out and "0.50" in out and out.count("\n") == 6
    assert explain.main([str(workdir), "--step=1"]) == 0
    out = capsys.readouterr().out
    assert "400" in out and "1.25" in out and "audit off" in out and "700" in out
    assert "chosen" in out and " 25 " in out  # tokens/s of the second launch
    metrics = workdir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"lag"', '"unknown"'))
    assert explain.main([str(workdir), "--step=1"]) == 0
    assert "1.25" not in capsys.readouterr().out, "a run that was recorded before lag was"


@pytest.mark.parametrize("arguments,told", [(["--step=7"], "--step=7"), ([], "no step explains")])
def test_what_cannot_be_explained_is_said_in_one_line(
        workdir: Path, capsys: Any, arguments: list[str], told: str) -> None:
    if not arguments:
        (workdir / "metrics.jsonl").write_text(encode({"step": 0, "reward/mean": 0.0}))
    assert explain.main([str(workdir), *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_the_report_shows_settings_savings_and_regret(workdir: Path) -> None:
    html = write_report(workdir).read_text()
    assert "packed tokens over time" in html
    assert "seconds saved, spent and lost" in html
    assert "regret of the controller" in html and "1.4" in html
    assert base64.b64decode(html.split("base64,")[1].split('"')[0]).startswith(b"<?xml")
