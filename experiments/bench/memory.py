"""Measures the peak memory of a run without speculation, with it, and with drafter training.

    python experiments/bench.py memory --config=staleness --config.steps=4

Writes results/bench_memory.json. Each run has a process of its own. An eagle head without a path
starts from random weights, which need as much memory as trained ones.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from absl import flags

from specrl_jax.config import Config, check
from specrl_jax.metrics.progress import say
from specrl_jax.metrics.run_files import read_metrics

from . import results
from .subprocess_runner import ProcessDied, train_in_subprocess

NEEDS_MODEL = False
MEGABYTE = 2**20


def define_flags() -> None:
    """Defines the flags of `bench.py memory`."""
    flags.DEFINE_string("out", None, "JSON file (default: results/bench_memory.json)")


def main(config: Config, workdir: Path) -> int:
    """Runs the benchmark; returns the exit status."""
    check(config.spec.drafter in ("eagle", "merge"), "spec.drafter", config.spec.drafter,
          "training needs something that learns; choose eagle")
    out = results.destination(flags.FLAGS.out, "bench_memory.json")
    made = results.blank(config)
    for name, variant in variants(config).items():
        say(name)
        try:
            made["cases"][name] = measure(variant)
        except ProcessDied as died:
            say(f"error: run {name}: {died}")
            return 1
        results.write(out, made)
    off = made["cases"]["off"]["peak_bytes"]
    for name, found in made["cases"].items():
        print(f"{name:9} peak {found['peak_bytes'] / MEGABYTE:7.0f} MiB, "
              f"{found['peak_bytes'] / off:.2f} of off; buffer "
              f"{found['buffer_bytes'] / MEGABYTE:.1f} of {config.distill.megabytes} MiB")
    print(f"wrote {out}")
    return 0


def variants(config: Config) -> dict[str, Config]:
    """Returns the configs without speculation, with it, and with drafter training."""
    replace = dataclasses.replace
    return {
        "off": replace(config, spec=replace(config.spec, drafter="off"),
                       distill=replace(config.distill, when="off")),
        "on": replace(config, distill=replace(config.distill, when="off")),
        "training": replace(config, distill=replace(config.distill, when="interval"))}


def measure(config: Config) -> dict[str, Any]:
    """Returns the peak memory of a run in a new process.

    Linux counts the memory that the parent held at the start as the child's too; this parent has
    loaded the same packages and nothing else.
    """
    with tempfile.TemporaryDirectory() as workdir:
        train_in_subprocess(config, Path(workdir), cache=False)  # compiling needs memory too
        rows = read_metrics(workdir)
    return {"peak_bytes": rows[-1]["memory/peak_bytes"], "steps": len(rows),
            "buffer_bytes": max(row.get("distill/buffer_bytes", 0) for row in rows),
            "budget_bytes": config.distill.megabytes * MEGABYTE}
