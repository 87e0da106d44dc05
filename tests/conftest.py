"""Strictness and isolation of all tests: 8 fake devices, no silent broadcasting, no user files."""

import os
import tempfile
from pathlib import Path

# Before JAX is imported, and inherited by the processes that tests start.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
_HOME = tempfile.TemporaryDirectory(prefix="specrl_jax_tests_")
os.environ["XDG_CACHE_HOME"] = str(Path(_HOME.name) / "cache")
os.environ["TFDS_DATA_DIR"] = str(Path(_HOME.name) / "tensorflow_datasets")

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_unconfigure() -> None:
    _HOME.cleanup()
