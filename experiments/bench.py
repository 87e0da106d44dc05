"""Runs one benchmark or study.

    python experiments/bench.py NAME [flags]
    python experiments/bench.py NAME --help     # the benchmark's own flags

A benchmark prints a table and writes JSON to experiments/results, or to --out=FILE.
"""

import importlib
import sys
from pathlib import Path

from bench import standalone  # noqa: F401  (it puts the checkout's packages on the path)

STANDALONE = {  # they run without absl and the other dependencies
    "contract": "the kernels' tests on this device",
    "kernels": "each kernel at real shapes against memory bandwidth and JAX's own",
    "rollouts": "rollouts of random weights at Qwen2.5's shapes, with each kernel",
    "steps": "RL steps of random weights: without drafts, and with a head that learns"}
BENCHMARKS = STANDALONE | {
    "speculation": "drafters, settings and policies against plain decoding, by rows (Fig. 7)"}
STUDIES = {
    "controller": "controllers against the best fixed setting of each load",
    "staleness": "ways to train the drafter during RL",
    "algorithms": "one model with each algorithm, with adapters and on generated tasks",
    "when_it_pays": "the accept length from which drafts pay on a TPU, by its compiler's clock"}
ALL = BENCHMARKS | STUDIES
HELP = ("-h", "--help", "--helpshort", "--helpfull")


def main(argv: list[str]) -> int:
    """Runs the benchmark that `argv` names; returns the exit status."""
    name = argv[1] if len(argv) > 1 else "--help"
    if name in HELP:
        print(usage())
        return 0
    if name not in ALL:
        print(f"error: {name}: no such benchmark; choose one of {', '.join(ALL)}",
              file=sys.stderr)
        return 2
    sys.argv = [f"{argv[0]} {name}", *argv[2:]]
    module = importlib.import_module(f"{'studies' if name in STUDIES else 'bench'}.{name}")
    if name in STANDALONE:
        return module.main()
    run_with_config(module)
    return 0


def usage() -> str:
    """The text of --help."""
    def lines(some: dict[str, str]) -> list[str]:
        return [f"  {name:<13} {text}" for name, text in some.items()]

    return "\n".join([__doc__.strip(), "", "Benchmarks:", *lines(BENCHMARKS), "",
                      "Studies:", *lines(STUDIES)])


def run_with_config(module) -> None:
    """Parses --config and the module's flags, calls its `main` and exits.

    `main(config, workdir)` of a study writes runs; that of a benchmark does not, and where
    `NEEDS_MODEL` it is `main(config, actor)`.
    """
    import config_flags
    import run_flags
    from absl import flags
    from bench import results

    def call(config, workdir: Path) -> int:
        if not hasattr(module, "define_flags"):  # a study
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
