"""What every script imports first, so that it can be stopped, and can print, without a traceback.

Ctrl-C and SIGTERM then end a script with a line while its imports run, which takes seconds; Python
would print where it was, or lose the signal inside of an import. Its output takes any character,
whatever the encoding of the terminal; it may have no reader any more, as in `script | head`, or no
room.
"""

import atexit
import contextlib
import os
import select
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


def _end_with_error(kind: type[BaseException], error: BaseException,
                    trace: TracebackType | None) -> None:
    """Prints a line in place of a traceback if it was the output that could not be written."""
    if isinstance(error, OSError) and (
            _flush() or isinstance(error, BrokenPipeError) and _reader_is_gone()):
        with contextlib.suppress(OSError):  # stderr may be the same
            print(f"error: standard output: {error.strerror}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _reader_is_gone() -> bool:
    """Returns whether standard output is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _flush() -> OSError | None:
    """Leaves Python nothing to flush, and to complain of, at its end; returns what went wrong."""
    try:
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error


def _flush_at_end() -> None:
    """Ends with status 1 where the end of the output was lost, unless nobody wanted it."""
    problem = _flush()
    if problem and not isinstance(problem, BrokenPipeError):
        os.write(2, f"error: standard output: {problem.strerror}\n".encode())
        os._exit(1)


if Path(sys.argv[0]).absolute().parent == Path(__file__).absolute().parent:  # it is a script's
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    sys.excepthook = _end_with_error
    atexit.register(_flush_at_end)
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda errors: None)(errors="backslashreplace")
