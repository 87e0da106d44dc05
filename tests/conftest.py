"""Strictness and isolation of all tests: 8 fake devices, no silent broadcasting, no user files."""

import gc
import importlib.metadata
import itertools
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before JAX is imported, and inherited by the processes that tests start. Tests compile more than
# they run, and on a CPU this compiles in half the time; what XLA_FLAGS holds already stays as it
# is. A jaxlib that does not know a flag would abort.
_QUICK = "" if Path("/dev/nvidia0").exists() else " --xla_backend_optimization_level=0" + (
    " --xla_cpu_use_fusion_emitters=false"
    if importlib.metadata.version("jaxlib").startswith("0.10.") else "")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8" + _QUICK)
_HOME = tempfile.TemporaryDirectory(prefix="specrl_jax_tests_")
os.environ["XDG_CACHE_HOME"] = str(Path(_HOME.name) / "cache")
os.environ["TFDS_DATA_DIR"] = str(Path(_HOME.name) / "tensorflow_datasets")
# What one test compiled, the others and the scripts that they start need not.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(_HOME.name) / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402
import pytest  # noqa: E402

# Tracing makes many objects that live on; Python's collector would look at all of them again and
# again: a tenth to a seventh of the time of tests.
gc.set_threshold(100_000, 20, 50)
jax.config.update("jax_numpy_rank_promotion", "raise")
_CPU = pytest.StashKey[float]()  # CPU seconds when the last phase of a test ended
MEMORY_MAPS = 25_000  # Linux allows 65,530; XLA crashes where a program gets none


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-limit", type=float, metavar="SECONDS", help="lists the tests that used "
                     "more CPU time, with their fixtures and child processes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_CPU] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    before, item.stash[_CPU] = item.stash[_CPU], _cpu_seconds()
    # Properties are what reaches the main process of pytest-xdist.
    report.user_properties.append(("cpu", item.stash[_CPU] - before))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    limit = terminalreporter.config.getoption("--cpu-limit")
    if limit is None:
        return
    seconds: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += sum(value for name, value in report.user_properties
                                          if name == "cpu")
    terminalreporter.section(f"tests above {limit} CPU seconds")
    for test, used in seconds.most_common():
        if used > limit:
            terminalreporter.line(f"{used:8.2f} {test}")


def _cpu_seconds() -> float:
    """Returns CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.fixture(autouse=True)
def room_for_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drops compiled programs before their memory maps run out; looks after every 16th test."""
    yield
    maps = Path("/proc/self/maps")
    if zlib.crc32(request.node.nodeid.encode()) % 16 == 0 and maps.exists():
        if maps.read_bytes().count(b"\n") > MEMORY_MAPS:
            jax.clear_caches()


def pytest_unconfigure() -> None:
    _HOME.cleanup()
