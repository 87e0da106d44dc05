"""How much memory does speculation take, and the training of its drafter?

    python experiments/bench_memory.py --config=staleness --config.steps=4

Three runs of the same config, each in a process of its own: without speculation, with it, and with
training of the drafter at every step. Told are the peak resident set of each process and, of the
last, the bytes of the features' buffer and the budget that bounds them. An eagle head without a
path starts from random weights, which weigh as much as trained ones.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import config_flags
from absl import flags
from bench import results
from bench.apart import ProcessDied, train_apart

from specrl_jax.config import Config, check
from specrl_jax.io.metrics import read_metrics

MEGABYTE = 2**20
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_memory_cpu.json in "
                          "experiments)")


def main(config: Config, workdir: Path) -> int:
    del workdir
    results.refuse_workdir()
    check(config.spec.drafter in ("eagle", "merge"), "spec.drafter", config.spec.drafter,
          "training needs something that learns; choose eagle")
    out = results.destination(OUT.value, "bench_memory_cpu.json")
    made = results.blank(config)
    for name, variant in variants(config).items():
        print(name, file=sys.stderr, flush=True)
        try:
            made["cases"][name] = measure(variant)
        except ProcessDied as died:
            print(f"error: run {name}: {died}", file=sys.stderr)
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
    """Speculation off, on, and on with training."""
    replace = dataclasses.replace
    return {
        "off": replace(config, spec=replace(config.spec, drafter="off"),
                       distill=replace(config.distill, when="off")),
        "on": replace(config, distill=replace(config.distill, when="off")),
        "training": replace(config, distill=replace(config.distill, when="interval"))}


def measure(config: Config) -> dict[str, Any]:
    """Of a run in a fresh process.

    Linux counts what a parent held when it started a process as that process's, too; this one has
    loaded the same packages and no more.
    """
    with tempfile.TemporaryDirectory() as workdir:
        train_apart(config, Path(workdir), cache=False)  # compiling takes memory, too
        rows = read_metrics(workdir)
    return {"peak_bytes": rows[-1]["memory/peak_bytes"], "steps": len(rows),
            "buffer_bytes": max(row.get("distill/buffer_bytes", 0) for row in rows),
            "budget_bytes": config.distill.megabytes * MEGABYTE}


if __name__ == "__main__":
    config_flags.run(main)
