"""What this process has held of the machine's memory."""

import resource
import sys


def peak_rss() -> int:
    """Most bytes of memory this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
