"""bench.py: its commands, bounds of rounds, timing, and result files."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from experiments.bench import hardware, results, roofline, timing
from experiments.bench.hardware import Hardware
from experiments.compile import work
from specrl_jax.config import ConfigError
from specrl_jax.model.architecture import Architecture

ARCH = Architecture(vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
                    num_kv_heads=2, head_dim=4)
MACHINE = Hardware(1e9, 1e12, {"sum": 1e9}, {"a @ b": 1e12})


def test_device_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", none)
    for ask in (hardware.machine, hardware.first_device):
        with pytest.raises(SystemExit, match="^error: JAX_PLATFORMS = .*: JAX finds no such dev"):
            ask()


@pytest.mark.ci
def test_bench_help_lists_every_benchmark_and_each_one_starts(command):
    listed = re.findall(r"^  (\w+) +\S", command("bench.py", "--help").stdout, re.MULTILINE)
    assert {"rollouts", "speculation", "controller", "kernels"} < set(listed)
    for name in listed:
        done = command("bench.py", name, "--help")
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_bench_unknown_name_is_refused_in_one_line(command):
    done = command("bench.py", "rollout")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: rollout: no such benchmark; choose one of contract,")
    assert done.stderr.count("\n") == 1


def test_ratio_of_pairs_is_taken_pair_by_pair():
    actual = timing.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert actual == {"min": 1.0, "median": 2.0, "max": 3.0, "values": [2.0, 3.0, 1.0]}
    with pytest.raises(ValueError):
        timing.ratio([1.0], [1.0, 2.0])


def test_alternate_starts_each_repeat_with_the_next_task():
    order = []
    tasks = {name: (lambda name=name: order.append(name) or name) for name in "abc"}
    assert timing.alternate(tasks, 2) == {"a": ["a"] * 2, "b": ["b"] * 2, "c": ["c"] * 2}
    assert "".join(order) == "abcbca"


def test_context_by_round_counts_live_rows_and_tokens():
    commits = np.asarray([[1, 3, 2, 9], [2, 2, 9, 9]])
    rows, context = roofline.context_by_round(np.asarray([5, 3]), commits, np.asarray([3, 2]))
    assert rows.tolist() == [2, 2, 1]
    assert context.tolist() == [4 + 2, 5 + 4, 8]


def test_rounds_bound_equals_hand_count():
    rows, context = np.asarray([2, 1]), np.asarray([10, 6])
    bound = roofline.rounds_bound(ARCH, MACHINE, rows, context, 1.0, 4)
    moved = 2 * work.weight_bytes(ARCH, 4) + 4 * 2 * 2 * 2 * 4 * (10 + 2 + 6 + 1)
    assert bound.kind == "bytes" and bound.seconds == pytest.approx(moved / 1e9)
    slow = dataclasses.replace(MACHINE, peak=1e6)
    flops = 2 * 3 * (work.layer_matmul_params(ARCH) + 24 * 16) + 4 * 2 * 4 * 4 * (16 + 3)
    bound = roofline.rounds_bound(ARCH, slow, rows, context, 1.0, 4)
    assert bound.kind == "flops" and bound.seconds == pytest.approx(flops / 1e6)


def test_results_earlier_reads_back_or_refuses(tmp_path):
    path = tmp_path / "a.json"
    assert results.earlier(path) == {}
    results.write(path, {"cases": {"uniform-1": {}}})
    assert results.earlier(path) == {"uniform-1": {}}
    with pytest.raises(ConfigError, match="a.json: it was made with another architecture"):
        results.earlier(path, architecture={"eos": (1,)})
    results.write(path, {"cases": {"uniform-1": {}}, "architecture": {"eos": (1,)}})
    assert results.earlier(path, architecture={"eos": (1,)}) == {"uniform-1": {}}
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no result of a benchmark"):
        results.earlier(path)
