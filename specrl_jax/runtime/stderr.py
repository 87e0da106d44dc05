"""Lines on stderr, so that results on stdout stay clean."""

import sys


def say(text: str) -> None:
    """Prints a line on stderr at once."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Prints a warning on stderr."""
    say(f"WARNING: {text}")
