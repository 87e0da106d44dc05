"""Ctrl-C and SIGTERM: the process says how to go on and ends, whatever it is computing.

Python raises KeyboardInterrupt only between its own instructions, which is late while a compiled
program runs or is being compiled. A thread waits for the signal too, and ends the process where the
main thread has not. Files are written so that a kill leaves them good at any moment.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console

EXIT_STOPPED = 130
GRACE = 0.3  # seconds in which the main thread may end the process itself


class Stopped(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


@contextlib.contextmanager
def stops(say: Callable[[], str]) -> Iterator[None]:
    """Ends the process with EXIT_STOPPED on Ctrl-C or SIGTERM. For the main thread.

    Args:
      say: called when a signal has come, from any thread; the line to print.
    """
    once = threading.Lock()

    def leave() -> None:
        once.acquire()  # never given back: whoever comes second waits for the end
        Console(stderr=True).show_cursor()
        print(f"\n{say()}", file=sys.stderr, flush=True)
        os._exit(EXIT_STOPPED)  # the ordinary end waits for threads that compile

    def watch() -> None:
        while os.read(heard, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
            pass
        time.sleep(GRACE)
        leave()

    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        leave()
