"""Scripts end with a line at any moment, and print any character."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HANGS, ROOT, script_environment

SCRIPTS = ("bench_controller", "compare_runs", "compile_for", "eval", "explain", "export",
           "generate", "plan", "sft", "staleness", "train", "train_drafter")
SLOW = "import time; print('importing', flush=True); time.sleep(3600)"


def start(*arguments: object, **variables: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *map(str, arguments)], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, cwd=ROOT, env=script_environment() | variables)


@pytest.mark.parametrize("script", SCRIPTS)
def test_signal_during_imports_ends_a_script_with_a_line(script: str, tmp_path: Path) -> None:
    for package in ("absl", "rich"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), script_environment()["PYTHONPATH"]])
    number = signal.SIGINT if len(script) % 2 else signal.SIGTERM
    process = start(ROOT / "experiments" / f"{script}.py", PYTHONPATH=path)
    try:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "\nstopped\n")


@pytest.mark.parametrize("script", ["train", "explain"])  # a page, and a few lines
def test_output_without_a_reader_is_no_traceback(script: str) -> None:
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, ROOT / "experiments" / f"{script}.py", "--help"], text=True, stdout=write,
        stderr=subprocess.PIPE, env=script_environment(), timeout=HANGS)
    os.close(write)
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
    assert ended.returncode in (0, 1)
    if ended.returncode == 1:
        assert ended.stderr.endswith("error: standard output: Broken pipe\n")


def test_output_to_a_full_disk_is_a_line() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, ROOT / "experiments" / "explain.py", "--help"], text=True, stdout=full,
            stderr=subprocess.PIPE, env=script_environment(), timeout=HANGS)
    assert ended.returncode == 1
    assert ended.stderr == "error: standard output: No space left on device\n"


def test_second_signal_does_not_interrupt_the_way_out() -> None:
    code = """
import sys, time
sys.path.insert(0, "experiments")
import interrupt
interrupt.WAY_OUT = 3600.0
def main():
    try:
        print("running", flush=True)
        time.sleep(3600)
    finally:
        print("leaving", flush=True)
        sys.stdin.readline()
        print("left", flush=True)
sys.exit(interrupt.until_stopped(main))
"""
    process = start("-c", code)
    try:
        assert process.stdout is not None
        for line in ("running\n", "leaving\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        out, error = process.communicate("\n", timeout=HANGS)
    finally:
        process.kill()
    assert (process.returncode, out, error) == (130, "left\n", "\nstopped\n")


def test_output_takes_any_character_whatever_its_encoding() -> None:
    code = """
import sys
sys.path.insert(0, "experiments")
sys.argv[0] = "experiments/generate.py"
import early
from rich.console import Console
from rich.table import Table
print("a\\xe9\\u20ac\\ud800")
table = Table("\\xe9")
table.add_row("\\u20ac")
Console().print(table)
"""
    process = start("-c", code, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    out, error = process.communicate(timeout=HANGS)
    assert process.returncode == 0, error
    assert out.startswith("a\\xe9\\u20ac\\ud800\n") and "\\u20ac" in out.splitlines()[-2]


def test_settings_of_jax_that_break_programs_are_undone_and_told() -> None:
    code = """
import sys
sys.path.insert(0, "experiments")
import config_flags
config_flags.settle_jax()
import jax.numpy as jnp
print(jnp.ones(1).dtype, (jnp.ones(1) + jnp.ones(1, "int32")).dtype)
"""
    process = start("-c", code, JAX_ENABLE_X64="1", JAX_NUMPY_DTYPE_PROMOTION="strict",
                    JAX_DISABLE_JIT="1")
    out, error = process.communicate(timeout=HANGS)
    assert out == "float32 float32\n", error
    assert error.splitlines() == [
        "WARNING: JAX_ENABLE_X64 = True: set to False, with which the programs were written",
        "WARNING: JAX_NUMPY_DTYPE_PROMOTION = strict: set to standard, with which the programs "
        "were written",
        "WARNING: JAX_DISABLE_JIT = True: set to False, with which the programs were written"]
