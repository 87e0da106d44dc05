"""A reward for short answers."""

from collections.abc import Mapping
from typing import Any


def brevity(prompt: str, completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 for an empty completion, 1/2 for 10 characters, 1/3 for 20."""
    return 10 / (10 + len(completion))
