"""What invariant numerics cost, and that speculation then changes no bit of a real model's rollout.

    python experiments/bench_numerics.py --config.draft.path=runs/drafter/drafter \\
        --config.rollout.temperature=0.6 --config.rollout.max_new_tokens=128

For each batch size, plain decoding and each drafter at each setting in both modes of
model.numerics, timed alternately in this process. In the invariant mode tokens and the three
log-probabilities of every token must be those of plain decoding, bit for bit; in the default mode
what differs is counted: the tokens before the first one that does, and the sequences in which one
does, which a near tie alone may bring about.
"""

import dataclasses
import sys
from pathlib import Path

import config_flags
import run_flags
from absl import flags
from bench import numerics, results, show, speculation
from bench.numerics import MODES
from bench.speculation import Arm
from bench.timing import alternate
from rich.table import Table

from specrl_jax import sharding
from specrl_jax.config import DRAFTERS, Config, ConfigError
from specrl_jax.io.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.rollout.prompts import make_prompts

BATCH = flags.DEFINE_list("batch", ["1", "16"], "rows of each case")
DRAFTER = flags.DEFINE_list("drafter", ["history", "merge"], f"some of {', '.join(DRAFTERS[1:])}")
SETTING = flags.DEFINE_string("setting", "4x2x8", "depth x branch x nodes of a row, root included")
REPEATS = flags.DEFINE_integer("repeats", 6, "timed runs of each arm", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_numerics.json in "
                          "experiments)")


def main(config: Config, workdir: Path) -> int:
    out = results.destination(OUT.value, "bench_numerics.json")
    for name in DRAFTER.value:
        if name not in DRAFTERS[1:]:
            raise ConfigError(f"--drafter={name}: choose some of {', '.join(DRAFTERS[1:])}")
    for rows in BATCH.value:
        if not (rows.isdigit() and int(rows)):
            raise ConfigError(f"--batch={rows}: give positive numbers, such as 1,16")
    cell = speculation.parse(SETTING.value)
    config, actor = run_flags.resolve(config)
    use_persistent_cache()
    prompts = make_prompts(config, actor.source.tokenizer, _say).tokens
    params = actor.params(sharding.make_mesh(config.mesh))
    result, counter = results.blank(config), CompilationCounter()
    table = Table("rows", "", "invariant over default, seconds", "accept length", "bits", "differ")
    for rows in map(int, BATCH.value):
        tasks = {}
        for mode in MODES:
            model = dataclasses.replace(config.model, numerics=mode)
            arms = {name: Arm(dataclasses.replace(config, model=model), actor.source, params,
                              prompts[:rows], rows, name, [cell], counter)
                    for name in ("off", *DRAFTER.value)}
            arms["off"].sampler.compile()
            past = arms["off"].earlier(config.spec.history_past)
            for name, arm in arms.items():
                _say(f"{rows} rows: preparing {name}, {mode}")
                if name != "off":
                    arm.warm_up(cell, past)
                tasks[name, mode] = lambda arm=arm, name=name: arm.run(
                    None if name == "off" else cell)
        found = alternate(tasks, REPEATS.value, _say)
        result["cases"][str(rows)] = case = {
            name: numerics.compared(found, name) for name in ("off", *DRAFTER.value)}
        results.write(out, result)
        for name, one in case.items():
            table.add_row(str(rows), name, show.between(one["invariant over default"], digits=3),
                          f"{one['accept_length']:.2f}", str(one["equal_bits"]),
                          f"{one['default']['sequences that differ']} of {rows}")
    show.console().print(table)
    print(f"wrote {out}")
    broken = [f"{name}, {rows} rows" for rows, case in result["cases"].items()
              for name, one in case.items() if not one["equal_bits"]]
    for name in broken:
        print(f"failed: {name}: bits differ from those of plain decoding", file=sys.stderr)
    return 1 if broken else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
