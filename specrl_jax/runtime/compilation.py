"""Compiling in threads, counting backend compilations, and the persistent compilation cache."""

import concurrent.futures
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from specrl_jax.runtime.machine import cores
from specrl_jax.runtime.paths import user_cache
from specrl_jax.structs import PyTree

EVENT = "/jax/core/compile/backend_compile_duration"
THREADS = 4  # most programs compiled at once
Name: TypeAlias = str | tuple[str | int, ...]


class Program(NamedTuple):
    """One program of a run, described: it can be lowered without an array or a device."""

    name: Name
    function: Any  # from jax.jit
    args: tuple[PyTree, ...]  # arrays, or their jax.ShapeDtypeStruct with shardings
    options: dict[str, Any] | None = None  # of the compiler

    @property
    def title(self) -> str:
        """The name in one string, such as "launch 64"."""
        return self.name if isinstance(self.name, str) else " ".join(map(str, self.name))

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers the program for the devices that its arguments lie on."""
        return self.function.lower(*self.args)


def call(function: Any, *args: PyTree) -> PyTree:
    """Calls a jitted function; of abstract arguments, returns its results as abstract arrays.

    Their shardings are those that the compiler chooses for the devices of the arguments.
    """
    leaves = jax.tree.leaves(args)
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return function(*args)
    lowered = function.lower(*args)
    return abstract(lowered.out_info, lowered.compile().output_shardings)


def abstract(tree: PyTree, place: PyTree = None) -> PyTree:
    """Returns the jax.ShapeDtypeStruct of each array of a tree.

    Args:
      place: sharding of all, or a tree of them that is a prefix of `tree`; None keeps the arrays',
        and numpy arrays, which have none, as they are.
    """
    def describe(to: Any, part: PyTree) -> PyTree:
        return jax.tree.map(
            lambda a: a if to is None and isinstance(a, np.ndarray) else jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=a.sharding if to is None else to), part)

    return describe(None, tree) if place is None else jax.tree.map(describe, place, tree)


class Compiler:
    """Compiles programs in threads while others are still being traced.

        with Compiler() as compiler:
            update = compiler.add(Program("update", jax.jit(update), (state,)))
        update.result()(state)

    Leaving the block waits for all programs; an exception, such as Ctrl-C, for none that is queued.
    """

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(min(THREADS, cores()))
        self._added: list[concurrent.futures.Future[Any]] = []

    def add(self, program: Program) -> concurrent.futures.Future[Any]:
        """Lowers a program and starts compiling it; returns its future."""
        lowered = program.lower()
        self._added.append(self._pool.submit(lowered.compile, compiler_options=program.options))
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
