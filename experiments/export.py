"""Writes a run's actor as a Hugging Face directory, which transformers loads.

    python experiments/export.py --run=runs/smollm2 --out=my-model
    python experiments/export.py --config.model.path=model.gguf --out=my-model
    python experiments/export.py --run=runs/lora --adapter --out=my-adapter     # for peft

A run with adapters (learner.lora_rank) is written merged, or with --adapter by themselves.
"""

import sys
from pathlib import Path

import config_flags
import run_flags
from absl import flags

from specrl_jax import sharding
from specrl_jax.config import Config, check
from specrl_jax.model.export import DTYPES, export, export_adapter
from specrl_jax.runtime.paths import output_directory

flags.adopt_module_key_flags(run_flags)
OUT = flags.DEFINE_string("out", None, "directory to write; must not exist, or be empty",
                          required=True)
DTYPE = flags.DEFINE_enum("dtype", "float32", DTYPES, "dtype of the weights")

ADAPTER = flags.DEFINE_bool("adapter", False, "write the run's adapters alone, as peft loads them")


def main(config: Config, workdir: Path) -> int:
    out = output_directory("--out", OUT.value)
    config, actor = run_flags.resolve(config)
    mesh, arch = sharding.make_mesh(config.mesh), actor.source.arch
    if ADAPTER.value:
        check(DTYPE.value == "float32", "--dtype", DTYPE.value, "adapters are written in float32")
        export_adapter(out, arch, actor.trained(mesh), config.learner, config.model.path)
    else:
        export(out, arch, actor.params(mesh), actor.source.tokenizer, dtype=DTYPE.value)
    print(f"wrote {actor.name} to {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    config_flags.run(main)
