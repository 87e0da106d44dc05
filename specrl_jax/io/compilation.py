"""A counter of backend compilations, and the persistent compilation cache."""

import os
from pathlib import Path
from typing import Any

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts the backend compilations in this process after its construction."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == EVENT:
            self.count += 1

    def take(self) -> int:
        """Returns the count since the last call."""
        taken, self.count = self.count, 0
        return taken


def use_persistent_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless JAX is configured otherwise."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(base) / "specrl_jax" / "xla"))
