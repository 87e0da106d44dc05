"""The CPU of this machine; JAX reports neither its name nor its cores."""

import os
import platform
from pathlib import Path


def cores() -> int:
    """Returns the number of cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")  # Linux has it
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def processor() -> str:
    """Returns the CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
