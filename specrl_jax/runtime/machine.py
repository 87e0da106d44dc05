"""This machine's CPU, which JAX does not describe, and the memory of this process."""

import ctypes
import os
import platform
import resource
import sys
from pathlib import Path


def cores() -> int:
    """Returns the number of cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")  # Linux has it
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def processor() -> str:
    """Returns the CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def peak_rss() -> int:
    """Returns the peak resident memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back() -> None:
    """Returns freed memory from the C library (glibc) to the operating system.

    Loading and compiling leave gigabytes of it. Memory that is needed again costs page faults.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def maps() -> tuple[int, int]:
    """Returns the number of memory maps of this process, and their limit (Linux only).

    XLA maps each piece of a compiled CPU program separately, and aborts at the limit.
    """
    if sys.platform != "linux":
        return 0, sys.maxsize
    with Path("/proc/self/maps").open("rb") as lines:  # file names are bytes
        held = sum(1 for _ in lines)
    return held, int(Path("/proc/sys/vm/max_map_count").read_text())
