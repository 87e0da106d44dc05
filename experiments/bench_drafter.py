"""Speed of drafter training against its FLOP bound: features of a batch, and one update.

    python experiments/bench_drafter.py
    python experiments/bench_drafter.py --prompt_tokens=96 --new_tokens=192 --batch_tokens=512

Sequences are random tokens: only lengths count. Features are a forward of the actor and the
log-normaliser of each response token; an update is that of train_drafter.py, with its defaults. The
bound counts 2 FLOPs for each parameter of a matrix product and token, attention over visible keys,
and three times that where there is a gradient, without padding and recomputation, over the best
large GEMM, probed before and after. Both are timed alternately in this process.
"""

import sys
from pathlib import Path

import config_flags
import run_flags
from absl import flags
from bench import drafter, hardware, results, show

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.distill.offline import DrafterTraining

PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 96, "of each sequence", lower_bound=1)
NEW_TOKENS = flags.DEFINE_integer("new_tokens", 192, "response tokens of each", lower_bound=1)
BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 512, "of an update", lower_bound=1)
MICRO_TOKENS = flags.DEFINE_integer("micro_batch_tokens", 512, "of one pass", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 5, "timed runs of each", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_drafter.json in "
                          "experiments)")


def main(config: Config, workdir: Path) -> int:
    out = results.destination(OUT.value, "bench_drafter.json")
    config, actor = run_flags.resolve(config)
    options = DrafterTraining(batch_tokens=BATCH_TOKENS.value, feature_megabytes=0,
                              micro_batch_tokens=MICRO_TOKENS.value)
    params = actor.params(sharding.make_mesh(config.mesh))
    found = drafter.measure(config, actor.source, params, options, PROMPT_TOKENS.value,
                            NEW_TOKENS.value, REPEATS.value, hardware.Probes())
    results.write(out, results.blank(config) | found)
    for name, one in found["cases"].items():
        print(f"{name}: {show.between(one['seconds'], digits=2)} s, "
              f"{show.between(one['tokens_per_second'], digits=0)} response tokens/s, "
              f"{show.between(one['over_bound'], digits=2)} of the bound")
    print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    config_flags.run(main)
