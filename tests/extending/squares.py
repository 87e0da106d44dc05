"""A dataset from a Python function."""

from collections.abc import Callable
from typing import Any

from specrl_jax.config import DataConfig


def squares(data: DataConfig, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns 16 examples. `say` prints a line, for datasets that take long to load."""
    return [{"question": f"What is {n} squared?", "answer": str(n * n)} for n in range(16)]
