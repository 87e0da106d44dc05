"""The CPU of this machine: JAX calls every CPU `cpu` and tells no cores."""

import os
import platform
from pathlib import Path


def cores() -> int:
    """That this process may use."""
    known = hasattr(os, "sched_getaffinity")  # Linux has it
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def processor() -> str:
    """The CPU's name."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
