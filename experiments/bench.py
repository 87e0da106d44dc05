"""Runs one benchmark.

    python experiments/bench.py NAME [flags]
    python experiments/bench.py NAME --help     # the benchmark's own flags

A benchmark prints a table and writes JSON to experiments/results, or to --out=FILE.
"""

import importlib
import sys
from pathlib import Path

from bench import standalone  # noqa: F401  (it puts the checkout's packages on the path)

BENCHMARKS = {
    "rollout": "tokens/s of rollouts against the machine's bound and other engines (--engine)",
    "speculation": "drafters, settings and policies against plain decoding, by batch size (Fig. 7)",
    "controller": "controllers against the best fixed setting of each load",
    "staleness": "ways to train the drafter during RL; the same as staleness.py",
    "drafter": "drafter training against its FLOP bound",
    "learner": "policy updates against their FLOP bound, and the memory of a training step",
    "memory": "peak memory without speculation, with it, and with drafter training",
    "algorithms": "one model with each algorithm, with adapters and on generated tasks",
    "plan": "predicted seconds of RL steps (plan.py) against measured ones",
    "kernels": "each kernel at real shapes against memory bandwidth and JAX's own (needs jax only)"}
MODULES = {"controller": "bench_controller", "staleness": "staleness",
           "kernels": "bench.kernel_speed"}  # the others are bench.NAME
STANDALONE = ("kernels",)  # they run without absl and the other dependencies
HELP = ("-h", "--help", "--helpshort", "--helpfull")


def main(argv: list[str]) -> int:
    """Runs the benchmark that `argv` names; returns the exit status."""
    name = argv[1] if len(argv) > 1 else "--help"
    if name in HELP:
        print(usage())
        return 0
    if name not in BENCHMARKS:
        print(f"error: {name}: no such benchmark; choose one of {', '.join(BENCHMARKS)}",
              file=sys.stderr)
        return 2
    sys.argv = [f"{argv[0]} {name}", *argv[2:]]
    module = importlib.import_module(MODULES.get(name, f"bench.{name}"))
    if name in STANDALONE:
        return module.main()
    run_with_config(module)
    return 0


def usage() -> str:
    """The text of --help."""
    lines = [f"  {name:<12} {text}" for name, text in BENCHMARKS.items()]
    return "\n".join([__doc__.strip(), "", "Benchmarks:", *lines])


def run_with_config(module) -> None:
    """Parses --config and the module's flags, calls its `main` and exits.

    A module with `define_flags` has `main(config, workdir)` or, where `NEEDS_MODEL`,
    `main(config, actor)`.
    """
    import config_flags
    import run_flags
    from absl import flags
    from bench import results

    def call(config, workdir: Path) -> int:
        if not hasattr(module, "define_flags"):  # a script
            return module.main(config, workdir)
        if module.NEEDS_MODEL:
            return module.main(*run_flags.resolve(config))
        results.refuse_workdir()
        return module.main(config, workdir)

    if hasattr(module, "define_flags"):
        module.define_flags()
    if getattr(module, "NEEDS_MODEL", False):
        flags.adopt_module_key_flags(run_flags)
    for owner in (results, module):  # --help lists their flags
        flags.adopt_module_key_flags(owner)
    sys.modules["__main__"].__doc__ = module.__doc__  # what --help shows first
    config_flags.run(call)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
