"""Compiles every program of a run for TPUs or GPUs that are not there.

    pip install "jax[tpu]==0.10.2"      # or "jax[cuda13]": the compiler; see docs/compile_for.md
    python experiments/compile_for.py --config=qwen2_5_0_5b --target=v5e:4x4
    python experiments/compile_for.py --config=tiny --target=v5e:2x2 --config.mesh.data=4

It shows errors of the compiler, memory, copies, collectives, operations and least times. It says
nothing about speed, numerics or hangs: a model is "compiled for" a target, never said to run on
it. No weights are read. Of a preset with a table of targets, --target takes mesh and batches. Exit
status 1 and one line a failure if a program does not compile, does not fit, or copies a cache.
"""

import sys
from pathlib import Path

import config_flags
from absl import flags
from compile import targets

from specrl_jax.config import Config, ConfigError
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.paths import output_file

TARGET = flags.DEFINE_string("target", None, "devices: v5e:2x2, v6e:4x4, v5p:4x4x4, ..., or h100, "
                             "h100:8, h200, a100, b200")
OUT = flags.DEFINE_string("out", None, "JSON file with all findings")
ONLY = flags.DEFINE_list("only", [], "beginnings of programs' names, such as launch,update")
JOBS = flags.DEFINE_integer("jobs", 1, "programs compiled at once, of about 2 GB each",
                            lower_bound=1)


def main(config: Config, workdir: Path) -> int:
    del workdir
    from compile import compiling, findings, tables

    if not TARGET.value:
        raise ConfigError("--target: name the devices, such as --target=v6e:4x4")
    out = OUT.value and output_file("--out", OUT.value)
    result = compiling.compile_for(config, TARGET.value, ONLY.value, JOBS.value,
                                   report=lambda program: print(tables.line(program), flush=True))
    tables.show(result)
    lines = [line for program in result["programs"] for line in findings.failures(program)]
    if out:
        write_atomically(out, tables.text(result | {"failures": lines}))
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    with config_flags.one_line_errors():
        sys.argv = targets.with_target(sys.argv)
    config_flags.run(main)
