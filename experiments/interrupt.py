"""Ends a process on Ctrl-C or SIGTERM at once, or after a save in flight, with a line on how to
continue.

Python raises KeyboardInterrupt only between its own instructions, which is late while a compiled
program runs or compiles. So a thread waits for the signal too and ends the process. All files are
good at any moment, because they are replaced atomically.
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
GRACE = 1.0  # seconds that the main thread has to end the process itself


def until_stopped(main: Callable[[], int]) -> int:
    """Returns what `main` does; on Ctrl-C or SIGTERM lets it remove what it has half written."""
    with stops(lambda: "stopped"):
        return main()


@contextlib.contextmanager
def stops(say: Callable[[], str], saves: Callable[[], bool] | None = None) -> Iterator[None]:
    """Ends the process with EXIT_STOPPED on Ctrl-C or SIGTERM. For the main thread.

    Args:
      say: returns the line to print, and may wait; called after the signal, from any thread.
      saves: called on SIGTERM; returns whether the program will save and end by itself.
    """
    once, stopping = threading.Lock(), threading.Event()
    receiver, sender = os.pipe()

    def leave() -> None:
        once.acquire()  # never released: a second caller waits for the end
        Console(stderr=True).show_cursor()
        print(f"\n{say()}", file=sys.stderr, flush=True)
        os._exit(EXIT_STOPPED)  # a normal exit would wait for threads that compile

    def watch() -> None:
        while number := os.read(receiver, 1)[0]:
            if number == signal.SIGINT or number == signal.SIGTERM and not (saves and saves()):
                time.sleep(GRACE)
                leave()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not stopping.is_set():  # a second signal must not interrupt the way out
            stopping.set()
            sys.unraisablehook = lambda lost: None  # a finalizer swallows it; `watch` does not
            raise KeyboardInterrupt

    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, (lambda number, frame: None) if saves else interrupt)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except BaseException:  # C code may turn KeyboardInterrupt into a SystemError
        if stopping.is_set():
            leave()
        raise
