"""A verification of several tokens over one of a single token, and what products alone cost.

    python experiments/bench_forward.py
    python experiments/bench_forward.py --packed=1,4,8,16 --context=512

One row, a chain of drafts. The forward is what a round runs: embedding, layers with tree attention
over a cache, head. The products are those of its weights, independent of each other, each in the
orientation that is fastest for all of them at that number of tokens. All are timed alternately in
this process; `excess` is the forward's ratio to one token over the products' ratio.
"""

import sys
from pathlib import Path

import config_flags
import run_flags
from absl import flags
from bench import forward, results

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError

PACKED = flags.DEFINE_list("packed", ["1", "8", "16"], "tokens of a forward; the first is compared "
                           "with the others")
CONTEXT = flags.DEFINE_integer("context", 256, "cached tokens", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 30, "timed calls of each", lower_bound=2)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_forward.json in "
                          "experiments)")


def main(config: Config, workdir: Path) -> int:
    out = results.destination(OUT.value, "bench_forward.json")
    for value in PACKED.value or [""]:
        if not (value.isdigit() and 0 < int(value) <= forward.MOST):
            raise ConfigError(f"--packed={value}: give numbers from 1 to {forward.MOST}")
    config, actor = run_flags.resolve(config)
    params = actor.params(sharding.make_mesh(config.mesh))
    found = forward.measure(actor.source.arch, params, [int(v) for v in PACKED.value],
                            CONTEXT.value, REPEATS.value)
    results.write(out, results.blank(config) | {"context": CONTEXT.value} | found)
    for packed, one in found["cases"].items():
        print(f"{packed} tokens: forward {one['forward']['median'] * 1e3:.1f} ms, products "
              f"{one['products']['median'] * 1e3:.1f} ms as {one['orientation']}; over "
              f"{PACKED.value[0]}: {one['forward_ratio']['median']:.2f} and "
              f"{one['products_ratio']['median']:.2f}, excess {one['excess']['median']:.2f}")
    print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    config_flags.run(main)
