"""Compiling in threads, counting backend compilations, and the persistent compilation cache."""

import concurrent.futures
from typing import Any

import jax

from specrl_jax.io.places import user_cache

EVENT = "/jax/core/compile/backend_compile_duration"
THREADS = 4  # programs compiled at once


class Compiler:
    """Compiles programs in threads while others are still being traced.

        with Compiler() as compiler:
            update = compiler.add(jax.jit(update).lower(state))
        update.result()(state)

    Leaving the block waits for all programs; an exception, such as Ctrl-C, for none that is queued.
    """

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS)
        self._added: list[concurrent.futures.Future[Any]] = []

    def add(self, lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
            ) -> concurrent.futures.Future[Any]:
        """Starts compiling a lowered program; returns its future."""
        self._added.append(self._pool.submit(lowered.compile, compiler_options=options))
        return self._added[-1]

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        try:
            if kind is None:
                for future in self._added:
                    future.result()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


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
    if config.jax_compilation_cache_dir is None and (cache := user_cache("xla")):
        jax.config.update("jax_compilation_cache_dir", str(cache))
