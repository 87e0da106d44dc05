"""What this process holds of the machine's memory."""

import ctypes
import resource
import sys


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
