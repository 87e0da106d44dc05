"""Other engines on the same weights and prompts. Each one is an optional dependency."""

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from specrl_jax.config import ConfigError
from specrl_jax.model.weights import Source

from .specrl_engine import Timed
from .workload import Workload

WARM_UP_TOKENS = 4


class OtherEngine(Protocol):
    """Generates one workload again and again, sampled at temperature 1."""

    def generate(self, most: int) -> None:
        """Generates the tokens of each row, at most `most`, prefill included."""
        ...

    def settings(self) -> dict[str, Any]:
        """Returns the options that were chosen for it, for the result file."""
        ...

    def close(self) -> None:
        """Frees its memory."""
        ...


MODULES = {"transformers": ("torch", "transformers"), "llamacpp": ("llama_cpp",)}
PACKAGES = {"transformers": ("torch", "transformers"),
            "llamacpp": ("llama-cpp-python",)}  # versions in the result


def check_installed(name: str) -> None:
    """
    Raises:
      ConfigError: there is no such engine, or a package that it needs is missing.
    """
    if name not in MODULES:
        raise ConfigError(f"--engine={name}: choose some of {', '.join(MODULES)}")
    for module in MODULES[name]:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"--engine={name}: {module} is not installed; run "
                              'pip install -e ".[peers]"')


def make_engine(name: str, source: Source, workload: Workload, threads: int, directory: Path
                ) -> OtherEngine:
    """Returns the engine called `name`, ready to generate.

    Args:
      threads: number of CPU threads.
      directory: for converted weights, which later calls reuse.

    Raises:
      ConfigError: see `check_installed`, or the engine cannot run this model.
    """
    check_installed(name)
    module = importlib.import_module(f".engine_{name}", __package__)
    return module.Engine(source, workload, threads, directory)


def warm_up(engine: OtherEngine) -> None:
    """Generates a few tokens, so that nothing is set up while it is timed."""
    engine.generate(WARM_UP_TOKENS)


def timed(engine: OtherEngine, workload: Workload) -> Callable[[], Timed]:
    """Returns a function that generates the workload once and times it."""
    def run() -> Timed:
        began = time.perf_counter()
        engine.generate(workload.longest)
        return Timed(time.perf_counter() - began, workload.tokens)

    return run
