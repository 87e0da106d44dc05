"""What a person watching a run sees, on a terminal and in a log."""

import io

import jax
import pytest

from specrl_jax.metrics import progress as progress_module
from specrl_jax.metrics.progress import Progress

METRICS = {"reward/mean": 0.3125, "rollout/tokens_per_second": 512.4, "time/step": 10.0,
           "rollout/accept_length": 1.84, "time/rollout": 7.0, "time/learn": 2.5}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Replaces time.monotonic."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)
        monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_progress_in_a_log_is_one_plain_line_a_step(clock):
    stream, warning = io.StringIO(), "a " + "long " * 60 + "line [bold]with brackets[/bold]"
    with Progress(6, 2, stream) as progress:
        progress.warn(warning)
        for _ in range(2):
            progress.phase("rollout")
            progress.rollout(1, 8, 30)
            clock.now += 10
            progress.step(METRICS)
    warned, *lines = stream.getvalue().splitlines()
    assert warned.endswith(warning)
    for line, start in zip(lines, ("step 3/6  left 30s", "step 4/6  left 20s"), strict=True):
        assert line.startswith(start)
        assert all(shown in line for shown in ("0.312", "512 tok/s", "1.84", "rollout 70"))


def test_estimate_ignores_a_slow_first_step(clock):
    stream = io.StringIO()
    with Progress(10, 0, stream) as progress:
        for seconds in (300, 10, 10, 10):
            clock.now += seconds
            progress.step({})
    assert stream.getvalue().splitlines()[-1] == "step 4/10  left 1m00s"


def test_long_rollout_shows_in_a_log_now_and_then(clock):
    stream = io.StringIO()
    with Progress(6, 0, stream) as progress:
        progress.phase("rollout")
        for i in range(100):
            clock.now += 1
            progress.rollout(i, 100, 10 * i)
    lines = stream.getvalue().splitlines()
    assert lines == [f"step 1/6  rollout  {i}/100 sequences  {10 * i} tokens" for i in (29, 59, 89)]


def test_progress_on_a_terminal_is_a_live_line(clock):
    stream = Terminal()
    with Progress(6, 0, stream) as progress:
        progress.phase("rollout")
        clock.now += 0.05
        progress.rollout(1, 8, 11)
        clock.now += 0.5
        progress.rollout(2, 8, 22)
        progress.warn("checkpoint [3] is damaged")
        progress.step(METRICS)
        progress.phase("learn")
    text = stream.getvalue()
    assert "2/8 sequences  22 tokens" in text and "11 tokens" not in text
    assert "\x1b[1;31mWARNING: checkpoint [3] is damaged" in text
    assert "step 1/6" in text and "reward 0.312" in text and "learn" in text
    assert text.endswith("\x1b[?25h"), "the cursor comes back"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_processes_are_silent(monkeypatch, stream):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Progress(6, 0, stream) as progress:
        progress.phase("rollout")
        progress.warn("x")
        progress.step(METRICS)
    assert stream.getvalue() == ""
