"""Other systems as contenders, on the same weights and prompts. Each is an optional dependency."""

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from specrl_jax.config import ConfigError
from specrl_jax.model.weights import Source

from .ours import Timed
from .workload import Workload

WARM_UP_TOKENS = 4


class Peer(Protocol):
    """A system that generates one workload as often as asked; sampling at temperature 1."""

    def generate(self, most: int) -> None:
        """Generates each row's wanted tokens, but at most `most`; prefill included."""
        ...

    def settings(self) -> dict[str, Any]:
        """What was chosen for it, for the record."""
        ...

    def close(self) -> None: ...


MODULES = {"transformers": ("torch", "transformers"), "llamacpp": ("llama_cpp",),
           "tunix": ("tunix",)}
PACKAGES = {"transformers": ("torch", "transformers"), "llamacpp": ("llama-cpp-python",),
            "tunix": ("google-tunix",)}  # whose versions a result carries
INSTALL = {"transformers": 'pip install -e ".[peers]"', "llamacpp": 'pip install -e ".[peers]"',
           "tunix": 'pip install -e ".[tunix]" in an environment of its own'}


def check_installed(name: str) -> None:
    """
    Raises:
      ConfigError: no such peer, or a package that it needs is missing.
    """
    if name not in MODULES:
        raise ConfigError(f"--peer={name}: choose some of {', '.join(MODULES)}")
    for module in MODULES[name]:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"--peer={name}: {module} is not installed; run {INSTALL[name]}")


def make_peer(name: str, source: Source, workload: Workload, threads: int, directory: Path) -> Peer:
    """The peer called `name`.

    Args:
      threads: that it may use.
      directory: for converted weights, which later calls find there.

    Raises:
      ConfigError: see `check_installed`, or the peer cannot run this model.
    """
    check_installed(name)
    module = importlib.import_module(f".peer_{name}", __package__)
    return module.Peer(source, workload, threads, directory)


def warm_up(peer: Peer) -> None:
    peer.generate(WARM_UP_TOKENS)


def timed(peer: Peer, workload: Workload) -> Callable[[], Timed]:
    """A function that generates the workload once and times it."""
    def run() -> Timed:
        began = time.perf_counter()
        peer.generate(workload.longest)
        return Timed(time.perf_counter() - began, workload.tokens)

    return run
