"""Whether estimates of acceptance need a table for each class of prompts.

    python experiments/bench_classes.py --config.draft.path=runs/drafter/drafter \\
        --config.rollout.temperature=0.6 --config.control.min_survival=0

Two classes, word problems of GSM8K and arithmetic that is worked out step by step, are rolled out
with the same drafter and one setting. From one half of the rollouts come estimates: a class's own,
the other's, one for both, and the drafter's guess as it is. The other half tells how far they are
off. --config.data says where GSM8K lies.
"""

import dataclasses
import sys
from pathlib import Path

import config_flags
import run_flags
from absl import flags
from bench import classes, results, show, speculation
from bench.speculation import Arm
from rich.table import Table

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError
from specrl_jax.control import acceptance
from specrl_jax.io.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.rollout.prompts import make_prompts

PROMPTS = flags.DEFINE_integer("prompts", 32, "the first N prompts of each class", lower_bound=1)
ROLLOUTS = flags.DEFINE_integer("rollouts", 4, "of each class; half of them judge", lower_bound=2)
SETTING = flags.DEFINE_string("setting", "4x2x8", "depth x branch x nodes of a row, root included")
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_classes.json in "
                          "experiments)")
CLASSES = {"word problems": {"name": "gsm8k", "system": ""},
           "arithmetic": {"name": "specrl_arithmetic", "level": "chain",
                          "system": "Work through the problem step by step."}}


def main(config: Config, workdir: Path) -> int:
    out = results.destination(OUT.value, "bench_classes.json")
    cell = speculation.parse(SETTING.value)
    if not config.draft.path:
        raise ConfigError("draft.path = '': there is no drafter to estimate; give the directory of "
                          "an EAGLE head, such as train_drafter.py writes")
    config, actor = run_flags.resolve(config)
    use_persistent_cache()
    params = actor.params(sharding.make_mesh(config.mesh))
    outcomes: dict[str, list[acceptance.Acceptance]] = {}
    result = results.blank(config)
    for name, fields in CLASSES.items():
        data = dataclasses.replace(config.data, examples=PROMPTS.value, **fields)
        asked = dataclasses.replace(config, data=data)
        prompts = make_prompts(asked, actor.source.tokenizer, _say).tokens
        arm = Arm(asked, actor.source, params, prompts, config.rollout.batch_size, "eagle", [cell],
                  CompilationCounter())
        _say(f"{name}: compiling")
        arm.warm_up(cell, None)
        outcomes[name], lengths = [], []
        for i in range(ROLLOUTS.value):
            arm.sampler.engine.acceptance = acceptance.blank(1, cell.steps)
            counters = arm.run(cell, i).result.counters
            outcomes[name].append(arm.sampler.engine.acceptance)
            lengths.append(counters["committed"] / counters["row_rounds"])
            _say(f"{name}: rollout {i + 1} of {ROLLOUTS.value}, accept length {lengths[-1]:.2f}")
        result["cases"][name] = {"accept_length": lengths,
                                 "tried": float(classes.add(outcomes[name]).tried.sum())}
    found = classes.compare(outcomes)
    for name, case in result["cases"].items():
        case["estimates"] = found[name]
    results.write(out, result)
    table = Table("prompts", "estimate from", "calibration error", "log loss")
    for name, judged in found.items():
        for source, one in judged.items():
            table.add_row(name, source, f"{one['error']:.4f}", f"{one['log_loss']:.4f}")
    show.console().print(table)
    print(f"wrote {out}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
