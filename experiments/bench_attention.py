"""What tree attention's implementation costs a round on a CPU: shares of a round, and its bound.

    python experiments/bench_attention.py
    python experiments/bench_attention.py --rows=16 --implementations=xla,machine,reference

Plain decoding of the uniform workload, one engine for each implementation, timed alternately in
this process: rounds over the bound that bench_rollout.py describes, and the parts of a round. All
else is the same program.
"""

import sys
from pathlib import Path

import config_flags
import run_flags
from absl import flags
from bench import attention, hardware, results
from bench.ours import Ours
from bench.workload import make_workload
from specrl_kernels.tree_attention.api import IMPLEMENTATIONS

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError
from specrl_jax.io.compilation import CompilationCounter, use_persistent_cache

ROWS = flags.DEFINE_integer("rows", 64, "rows of the batch", lower_bound=1)
NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "tokens a row", lower_bound=8)
REPEATS = flags.DEFINE_integer("repeats", 3, "timed rollouts of each", lower_bound=1)
NAMES = flags.DEFINE_list("implementations", ["xla", "machine"], "of tree attention; the last one "
                          "is compared with the others")
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_attention.json "
                          "in experiments)")


def main(config: Config, workdir: Path) -> int:
    out = results.destination(OUT.value, "bench_attention.json")
    for name in NAMES.value:
        if name not in IMPLEMENTATIONS:
            raise ConfigError(f"--implementations={name}: choose some of "
                              f"{', '.join(IMPLEMENTATIONS)}")
    use_persistent_cache()
    config, actor = run_flags.resolve(config)
    params = actor.params(sharding.make_mesh(config.mesh))
    workload = make_workload("uniform", ROWS.value, NEW_TOKENS.value, actor.source.tokenizer)
    counter, ours = CompilationCounter(), {}
    for name in NAMES.value:
        _say(f"preparing {name}")
        ours[name] = attention.with_attention(
            Ours(config, actor.source.arch, params, workload, "off", counter), name)
        ours[name].warm_up()
    result = results.blank(config) | {"rows": ROWS.value} | attention.measure(
        ours, hardware.Probes(), REPEATS.value)
    results.write(out, result)
    for name, one in result["cases"].items():
        share = one["parts"]["share"]
        print(f"{name}: {one['over_bound']['median']:.2f} of the bound; attention "
              f"{share['attention']:.3f} of a round, commit {share['commit']:.3f}")
    print(f"wrote {out}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
