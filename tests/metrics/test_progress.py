"""What a person watching a run sees, in a log."""

import io

import jax

from specrl_jax.metrics import progress as progress_module
from specrl_jax.metrics.progress import Progress

METRICS = {"reward/mean": 0.3125, "rollout/tokens_per_second": 512.4, "time/step": 10.0,
           "rollout/accept_length": 1.84, "time/rollout": 7.0, "time/learn": 2.5}


def test_progress_in_a_log_is_one_plain_line_a_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    stream, warning = io.StringIO(), "a " + "long " * 60 + "line [bold]with brackets[/bold]"
    with Progress(6, 2, stream) as progress:
        progress.warn(warning)
        for _ in range(2):
            progress.phase("rollout")
            progress.rollout(1, 8, 30)
            now[0] += 10
            progress.step(METRICS)
    warned, *lines = stream.getvalue().splitlines()
    assert warned.endswith(warning)
    for line, start in zip(lines, ("step 3/6  left 30s", "step 4/6  left 20s"), strict=True):
        assert line.startswith(start)
        assert all(shown in line for shown in ("0.312", "512 tok/s", "1.84", "rollout 70"))


def test_other_processes_are_silent(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Progress(6, 0, stream) as progress:
        progress.phase("rollout")
        progress.warn("x")
        progress.step(METRICS)
    assert stream.getvalue() == ""
