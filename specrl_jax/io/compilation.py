"""Counting backend compilations, and the persistent compilation cache."""

import os
from pathlib import Path
from typing import Any

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts backend compilations of any function in this process since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **details: Any) -> None:
        if event == EVENT:
            self.count += 1

    def take(self) -> int:
        """The count since the last call."""
        taken, self.count = self.count, 0
        return taken


def use_persistent_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless JAX is configured otherwise."""
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(base) / "specrl_jax" / "xla"))
