"""Ends a process on Ctrl-C or SIGTERM at once, with a line on how to continue.

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

from early import EXIT_STOPPED, Stopped
from rich.console import Console

# Seconds that the main thread has to end the process itself: without and with files to remove.
GRACE, WAY_OUT = 0.3, 2.0


class Preemption:
    """SIGTERM to a run that saves before it ends.

    Attributes:
      running: whether steps are running, so that there is something to save.
      asked: whether to save and end.
    """

    def __init__(self) -> None:
        self.running = self.asked = False

    def note(self) -> bool:
        """Notes a SIGTERM; returns False where nothing can be saved, or on the second one."""
        if self.asked or not self.running:
            return False
        self.asked = True
        return True


def _note(number: int, frame: FrameType | None) -> None:
    """Leaves SIGTERM to the thread that reads the wake-up descriptor."""


def until_stopped(main: Callable[[], int]) -> int:
    """Returns what `main` does; on Ctrl-C or SIGTERM lets it remove what it has half written."""
    with stops(lambda: "stopped", grace=WAY_OUT):
        return main()


@contextlib.contextmanager
def stops(say: Callable[[], str], preemption: Preemption | None = None, grace: float = GRACE
          ) -> Iterator[None]:
    """Ends the process with EXIT_STOPPED on Ctrl-C or SIGTERM. For the main thread.

    Args:
      say: returns the line to print; called after the signal, from any thread.
      preemption: gets SIGTERM first.
      grace: seconds until the process ends, whatever the main thread does.
    """
    once, stopping = threading.Lock(), threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if not stopping.is_set():  # a second one must not interrupt the way out
            stopping.set()
            sys.unraisablehook = lambda lost: None  # a finalizer swallows it; `watch` does not
            raise Stopped

    def leave() -> None:
        once.acquire()  # never released: a second caller waits for the end
        Console(stderr=True).show_cursor()
        print(f"\n{say()}", file=sys.stderr, flush=True)
        os._exit(EXIT_STOPPED)  # a normal exit would wait for threads that compile

    def watch() -> None:
        while True:
            number = os.read(receiver, 1)[0]
            noted = number == signal.SIGTERM and preemption is not None and preemption.note()
            if number in (signal.SIGINT, signal.SIGTERM) and not noted:
                time.sleep(grace)
                leave()

    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, _note if preemption else stop)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        leave()
    except BaseException:  # C code may turn what `stop` raises into a SystemError
        if not stopping.is_set():
            raise
        leave()
