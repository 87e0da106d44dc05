"""Warnings where nothing else shows them."""

import sys


def warn(text: str) -> None:
    """Prints a warning on stderr."""
    print(f"WARNING: {text}", file=sys.stderr, flush=True)
