"""Runs the kernels' contract tests on this device and writes the outcome of each.

    python experiments/bench.py contract

Writes results/gpu_contract_PLATFORM.json. Tests that it holds as passed or skipped are not run
again; none starts after --seconds. Needs jax, numpy and pytest; tests that need more are skipped.
"""

import jax
import pytest

from . import hardware, standalone

FILES = [f"tests/kernels/test_{name}.py" for name in (
    "tree_attention", "gumbel_argmax", "head_argmax", "noise", "attention_parts")]
TINY = "repeatable"


class Recorder:
    """A pytest plugin that skips finished tests, records the others, and stops in time."""

    def __init__(self, results: standalone.Results) -> None:
        self.results, self.names = results, []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]
                                      ) -> None:
        self.names = [item.nodeid for item in items]
        left = {name for name in self.names
                if self.results.record["cases"].get(name, {"failed": True}).get("failed")}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in left])
        items[:] = [item for item in items if item.nodeid in left]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.results.add(report.nodeid, outcome(report))

    def pytest_runtest_logfinish(self) -> None:
        if not self.results.in_time():
            raise pytest.exit.Exception("out of time: run it again", returncode=0)


def outcome(report: pytest.TestReport) -> dict:
    """Returns the case of one test in the result file."""
    row = {"outcome": report.outcome, "seconds": round(report.duration, 3)}
    if report.skipped:
        row["reason"] = report.longrepr[2]
    elif report.failed:
        text = str(report.longrepr).strip().splitlines()
        row["failed"] = (text or ["no message"])[-1][:300]
    return row


def main() -> int:
    """Runs the tests; returns the exit status."""
    if jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")  # float32, not TF32
    default = f"gpu_contract_{hardware.first_device().platform}.json"
    args = standalone.parser(__doc__, default).parse_args()
    results = standalone.Results(args.out, default, {
        "command": standalone.command(), "machine": hardware.machine()}, args.seconds)
    recorder = Recorder(results)
    chosen = ["-k", TINY] if args.tiny else []
    files = [str(standalone.ROOT / file) for file in FILES]
    status = pytest.main([*files, *chosen, "-q", "-m", "not tpu", "-p", "no:cacheprovider",
                          "--rootdir", str(standalone.ROOT)], [recorder])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED,
                      pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(status)
    return results.finish(recorder.names)
