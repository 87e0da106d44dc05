"""Ctrl-C and SIGTERM end a process that Python itself cannot interrupt."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HANGS, ROOT

BUSY = """
import hashlib, signal, interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupt.stops(lambda: "go on"):
    print("busy", flush=True)
    {}
"""
HOURS = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9, 10**4)"  # one call of a compiled function
PYTHON = "while True: pass"
# What C code does to an exception that a signal handler raises in it: both were seen in JAX.
CHANGED = """try:
        while True: pass
    except KeyboardInterrupt:
        raise SystemError"""
LOST = """class Slow:
        def __del__(self):
            while True: pass
    Slow()
    while True: pass"""


def send(code: str, *signals: int) -> tuple[int, str, str]:
    """Runs a program that prints a line before each signal; returns status, output and errors."""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "experiments", text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        for number in signals:
            assert process.stdout.readline() == "busy\n"
            process.send_signal(number)
        out, error = process.communicate("\n", timeout=HANGS)
    finally:
        process.kill()
    return process.returncode, out, error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("work", [HOURS, PYTHON, CHANGED, LOST])
def test_signals_end_it_at_once_with_a_line(number: signal.Signals, work: str) -> None:
    assert send(BUSY.format(work), number) == (130, "", "\ngo on\n")


def test_second_signal_does_not_interrupt_the_way_out() -> None:
    code = """
import sys, time, interrupt
interrupt.GRACE = 3600.0
def main():
    try:
        print("busy", flush=True)
        time.sleep(3600)
    finally:
        print("busy", flush=True)
        sys.stdin.readline()
        print("left", flush=True)
sys.exit(interrupt.until_stopped(main))
"""
    assert send(code, signal.SIGINT, signal.SIGINT) == (130, "left\n", "\nstopped\n")


def test_sigterm_is_left_to_a_program_that_saves() -> None:
    """The first one; where nothing can be saved any more, it ends like Ctrl-C."""
    code = """
import interrupt
answers = [False, True]
def saves():
    print("busy", flush=True)
    return answers.pop()
with interrupt.stops(lambda: "go on", saves):
    print("busy", flush=True)
    while True: pass
"""
    assert send(code, signal.SIGTERM, signal.SIGTERM) == (130, "busy\n", "\ngo on\n")


@pytest.mark.ci
@pytest.mark.parametrize("script", ["train", "sft", "train_drafter"])
def test_signal_waits_for_the_save_in_flight(tmp_path: Path, script: str) -> None:
    """Also where Python cannot leave what it does."""
    code = f"""
import functools, hashlib, sys, time, interrupt, {script} as script
import numpy as np
from pathlib import Path
from specrl_jax.checkpoint import checkpoints
interrupt.GRACE = 0.1
write = checkpoints.write_checksums
def slow(*args):
    sys.stdin.readline()
    time.sleep(1)
    write(*args)
checkpoints.write_checksums = slow
workdir = Path({str(tmp_path)!r})
with interrupt.stops(functools.partial(script.how_to_go_on, workdir)):
    with checkpoints.Checkpoints(workdir / "checkpoints", 2) as saves:
        saves.save(1, dict(a=np.arange(3)), dict())
        print("busy", flush=True)
        {HOURS}
"""
    assert send(code, signal.SIGINT) == (
        130, "", "waiting for the checkpoint that is being written\n\nstopped; checkpoint 1 is "
        "good: run the same command again to go on\n")
