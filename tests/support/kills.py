"""Kills a process at a file operation: before the COUNT-th one whose text matches PLACE.

    python kills.py PLACE COUNT SCRIPT [FLAG...]

The text is the event of Python's audit and its first arguments: "open FILE MODE", "os.rename OLD
NEW". Other programs, and what is written in C++, raise no events.
"""

import os
import re
import runpy
import sys

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def die_at(place: str, count: int = 1) -> None:
    """Ends this process as a kill does."""
    left = count

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if event in EVENTS and re.search(place, " ".join((event, *map(str, args[:2])))):
            left -= 1
            if left == 0:
                os._exit(9)

    sys.addaudithook(hook)


if __name__ == "__main__":
    die_at(sys.argv[1], int(sys.argv[2]))
    del sys.argv[:3]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
