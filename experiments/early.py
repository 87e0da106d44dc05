"""What every script imports first, so that it can be stopped, and can print, without a traceback.

Ctrl-C and SIGTERM then end a script with a line while its imports run, which takes seconds; Python
would print where it was, or lose the signal inside of an import. Its output takes any character,
whatever the encoding of the terminal.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

EXIT_STOPPED = 130


class Stopped(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nstopped\n")
    os._exit(EXIT_STOPPED)


if Path(sys.argv[0]).absolute().parent == Path(__file__).absolute().parent:  # it is a script's
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda errors: None)(errors="backslashreplace")
