"""What every script imports first, so that it can be stopped, and can print, without a traceback.

Ctrl-C and SIGTERM then end a script with a line while its imports run, which takes seconds; Python
would print where it was, or lose the signal inside of an import. Its output takes any character,
whatever the encoding of the terminal.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

EXIT_STOPPED = 130


class Stopped(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nstopped\n")
    os._exit(EXIT_STOPPED)


def _raise_once(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # a second one must not interrupt the way out
        signal.signal(each, signal.SIG_IGN)
    raise Stopped


def until_stopped(main: Callable[[], int]) -> int:
    """Returns what `main` does; on Ctrl-C or SIGTERM prints a line and returns EXIT_STOPPED."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _raise_once)
    try:
        return main()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return EXIT_STOPPED


if Path(sys.argv[0]).absolute().parent == Path(__file__).absolute().parent:  # it is a script's
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda errors: None)(errors="backslashreplace")
