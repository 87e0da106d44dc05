"""What this process holds of the machine's memory."""

import ctypes
import resource
import sys
from pathlib import Path


def peak_rss() -> int:
    """Most bytes of memory this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back() -> None:
    """Hands the machine what is free but kept for later, where the C library can (glibc).

    Loading and compiling leave gigabytes of it; what is needed again costs page faults.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def maps() -> tuple[int, int]:
    """The memory maps this process holds, and the most that it may; no bound but on Linux.

    XLA maps each piece of a compiled CPU program by itself, and aborts at that bound.
    """
    if sys.platform != "linux":
        return 0, sys.maxsize
    with Path("/proc/self/maps").open() as lines:
        held = sum(1 for _ in lines)
    return held, int(Path("/proc/sys/vm/max_map_count").read_text())
