"""Ctrl-C and SIGTERM end a process that Python itself cannot interrupt."""

import signal
import subprocess
import sys

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("work", [HOURS, PYTHON, CHANGED, LOST])
def test_signals_end_it_at_once_with_a_line(number: signal.Signals, work: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.format(work)], cwd=ROOT / "experiments", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "busy\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "\ngo on\n")


def test_signal_ends_a_script_that_compiles_within_seconds() -> None:
    """As in XLA, no signal handler runs; what the main thread can still clean up, it does."""
    code = ("import hashlib, interrupt\n"
            "def main():\n    print('busy', flush=True)\n    {}\n"
            "interrupt.until_stopped(main)")
    process = subprocess.Popen(
        [sys.executable, "-c", code.format(HOURS)], cwd=ROOT / "experiments", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "\nstopped\n")
