"""What the controller itself takes of a round: plan, keep and note, next to whole rounds.

    python experiments/bench_plan.py                     # 64 rows of SmolLM2

Rows are the first prompts of config.data's split and draft with config.spec.drafter; rounds are
those of whole rollouts under --policy. The parts are compiled and timed apart, with what a call
from Python takes, for trees of config.spec.max_nodes nodes a row that all fit the largest bucket.
So the shares are upper bounds. Parts and rollouts alternate.
"""

import sys
from pathlib import Path

import config_flags
import numpy as np
import run_flags
from absl import flags
from bench import plan, results, show
from bench.speculation import Arm, Cell

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError
from specrl_jax.io.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.rollout.prompts import make_prompts

ROWS = flags.DEFINE_integer("rows", 64, "rows of the batch", lower_bound=1)
POLICY = flags.DEFINE_enum("policy", "budget", ["budget", "respec", "bandit"], "whose parts")
REPEATS = flags.DEFINE_integer("repeats", 5, "timed rollouts", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_plan.json in "
                          "experiments)")


def main(config: Config, workdir: Path) -> int:
    out = results.destination(OUT.value, "bench_plan.json")
    config, actor = run_flags.resolve(config)
    use_persistent_cache()
    prompts = make_prompts(config, actor.source.tokenizer, _say).tokens
    if len(prompts) < ROWS.value:
        raise ConfigError(f"--rows={ROWS.value}: data.split = {config.data.split!r} has "
                          f"{len(prompts)} prompts; give fewer rows")
    spec = config.spec
    rows, widest = ROWS.value, Cell(spec.max_depth, spec.max_branch, spec.max_nodes)
    params = actor.params(sharding.make_mesh(config.mesh))
    arm = Arm(config, actor.source, params, prompts[:rows], rows, spec.drafter, [widest],
              CompilationCounter(), POLICY.value)
    _say("compiling, and measuring what rounds cost")
    nothing = np.full((rows, spec.history_past, config.rollout.max_new_tokens), -1, np.int32)
    arm.warm_up(widest, nothing)
    result = results.blank(config)
    result["cases"][str(rows)] = found = plan.measure(arm, REPEATS.value, _say)
    results.write(out, result)
    show.console().print(plan.table(found))
    print(f"wrote {out}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
