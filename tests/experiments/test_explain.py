"""Launches become metrics, a table and figures."""

from pathlib import Path
from typing import Any

import pytest

from experiments import explain
from specrl_jax.metrics import launches
from specrl_jax.metrics.run_files import encode
from specrl_jax.runtime.workdir import write_config
from specrl_jax.structs import LaunchRecord


def launch(seconds: float, **changes: Any) -> LaunchRecord:
    known = dict(batch=8, seconds=seconds, last=False, rounds=4, row_rounds=32, committed=20,
                 drafted=48, packed=64, slots=32, draft_rounds=4, draft_depth=8,
                 control={"predicted_seconds": 0.5, "plain_seconds": 1.0,
                          "speculation_seconds": 0.1})
    return LaunchRecord(**(known | changes))


TRACE = [launch(0.5), launch(1.25, draft_depth=0, draft_rounds=0, rounds=12, packed=96)]


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    write_config(tmp_path, {"name": "made up"})
    rows = [{"step": step, "reward/mean": 0.5, "time/rollout": 1.4} | launches.summary(TRACE)
            for step in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(map(encode, rows)))
    return tmp_path


def test_summary_adds_up_launches() -> None:
    actual = launches.summary(TRACE)
    assert actual["control/draft_depth"] == pytest.approx(8 / 16)
    assert actual["control/verify_tokens"] == pytest.approx(160 / 16)
    assert actual["control/drafting"] == pytest.approx(4 / 16)
    assert actual["time/saved"] == pytest.approx(2.0 - 1.75)
    assert actual["time/regret"] == pytest.approx(0.25)
    assert actual["time/cost_error"] == pytest.approx(0.75 / 1.75)
    assert launches.recorded(actual)[1]["rounds"] == 12
    quiet = launch(0.1, control={}, draft_rounds=0)
    assert launches.summary([quiet]) == launches.summary([]) == {}
    assert "time/saved" not in launches.summary([launch(0.1, control={})])
    many = launches.summary([launch(0.1)] * (launches.MOST + 5))
    assert len(many[launches.LAUNCHES]) == launches.MOST and many["time/saved"] > 400


def test_explain_shows_steps_and_launches(workdir: Path, capsys: Any) -> None:
    assert explain.main([str(workdir)]) == 0
    out = capsys.readouterr().out
    header, row = (out.splitlines()[i].replace("┃", "│").split("│")[1:-1] for i in (1, 3))
    shown = {name.strip(): value.strip() for name, value in zip(header, row, strict=True)}
    assert float(shown["saved s"]) == float(shown["plain s"]) - float(shown["launches s"])
    assert float(shown["launches s"]) == sum(t.seconds for t in TRACE)
    assert explain.main([str(workdir), "--step=1"]) == 0
    assert "1.25e+03" in capsys.readouterr().out


@pytest.mark.parametrize("arguments,reason", [(["--step=7"], "--step=7"), ([], "no step records")])
def test_explain_refuses_bad_input_in_one_line(
        workdir: Path, capsys: Any, arguments: list[str], reason: str) -> None:
    if not arguments:
        (workdir / "metrics.jsonl").write_text(encode({"step": 0, "reward/mean": 0.0}))
    assert explain.main([str(workdir), *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
