"""What every script imports first, so that it can be stopped, and can print, without a traceback.

Ctrl-C and SIGTERM then end a script with a line while its imports run, which takes seconds; Python
would print where it was, or lose the signal inside of an import. Its output takes any character,
whatever the encoding of the terminal, and may have no reader any more, as in `script | head`.
"""

import atexit
import os
import signal
import sys
from pathlib import Path
from types import FrameType, TracebackType

EXIT_STOPPED = 130


class Stopped(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nstopped\n")
    os._exit(EXIT_STOPPED)


def _end_without_reader(kind: type[BaseException], error: BaseException,
                        trace: TracebackType | None) -> None:
    if issubclass(kind, BrokenPipeError):
        print("error: what the output was written to has ended", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _flush() -> None:
    """Leaves Python nothing to flush, and to complain of, at its end."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if Path(sys.argv[0]).absolute().parent == Path(__file__).absolute().parent:  # it is a script's
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    sys.excepthook = _end_without_reader
    atexit.register(_flush)
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda errors: None)(errors="backslashreplace")
