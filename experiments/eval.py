"""Measures the accuracy of a model on a split: avg@k and pass@k with 95 % intervals.

    python experiments/eval.py --run=runs/smollm2 --step=0 --out=before.json
    python experiments/eval.py --run=runs/smollm2 --baseline=before.json
    python experiments/eval.py --config=smollm2 --config.model.path=DIR --samples=8 --temperature=1

Prints a table and writes --out. --reward decides what is correct. Intervals are Wilson's for one
sample, else a percentile bootstrap over problems; the difference to --baseline is paired by
problem. A flag that is left out is the config's field in `eval`, so that with --run=DIR alone this
repeats what the run itself evaluated; --step=best is its best checkpoint.
"""

import json
from pathlib import Path
from typing import Any

import config_flags
import run_flags
from absl import flags
from rich.console import Console
from rich.table import Table

from specrl_jax.config import Config, override
from specrl_jax.evaluation.evaluate import (
    check_same_problems,
    evaluate,
    paired,
    read_evaluation,
    reward_of,
    task_config,
)
from specrl_jax.runtime.compilation import use_persistent_cache
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.paths import local_path, output_file

flags.adopt_module_key_flags(run_flags)
SPLIT = flags.DEFINE_string("split", None, "split of the data, such as train or test[:50%]")
PROBLEMS = flags.DEFINE_integer("problems", None, "use the first N problems; 0 is all of them")
SAMPLES = flags.DEFINE_integer("samples", None, "k, answers to each problem")
TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy")
REWARD = flags.DEFINE_string(
    "reward", None, "an answer is correct where this reward is at least 1: exact, latex or "
    "package.module:function (default: exact; the run's own where it does not use exact)")
OUT = flags.DEFINE_string("out", None, "JSON file to write")
BASELINE = flags.DEFINE_string("baseline", None, "an earlier --out file, to compare with")


def main(config: Config, workdir: Path) -> int:
    """Evaluates and prints; returns the exit status."""
    out = OUT.value and output_file("--out", OUT.value)
    config, actor = run_flags.resolve(config)
    config = override(config, asked(config))
    baseline = BASELINE.value and read_evaluation(local_path("--baseline", BASELINE.value))
    if baseline:
        data = task_config(config).data
        check_same_problems(baseline, {"reward": reward_of(config), "data": {
            "name": data.name, "level": data.level, "split": data.split}})
    use_persistent_cache()
    result = evaluate(config, actor)
    if baseline:
        result["paired"] = paired(baseline, result)
    console = Console(highlight=False)
    console.print(actor.name, markup=False, soft_wrap=True)
    console.print(table(result))
    if out:
        write_atomically(out, json.dumps(result) + "\n")
        print(f"wrote {out}")
    return 0


def asked(config: Config) -> dict[str, Any]:
    """Returns the fields of `eval` that the flags, or overrides of what they stand for, give."""
    return {"eval.split": run_flags.given("split", "data.split", config.eval.split),
            "eval.examples": run_flags.given("problems", "data.examples", config.eval.examples),
            "eval.samples": run_flags.given("samples", "eval.samples", config.eval.samples),
            "eval.temperature": run_flags.given("temperature", "rollout.temperature",
                                                config.eval.temperature),
            "eval.reward": run_flags.given("reward", "eval.reward", config.eval.reward)}


def table(result: dict[str, Any]) -> Table:
    """Returns the findings of an evaluation, one line per number."""
    data, shown = result["data"], Table("", "", "95 % interval")
    level = f" {data['level']}" if data["name"] == "specrl_arithmetic" else ""
    shown.add_row("problems", f"{len(result['problems'])} of {data['name']}{level} "
                              f"{data['split']}")
    shown.add_row("samples", f"{result['samples']} at temperature {result['temperature']:g}")
    shown.add_row("judged by", result["reward"])
    shown.add_row(f"avg@{result['samples']}", f"{result['accuracy']:.3f}",
                  span(result["interval"], result["interval_method"]))
    for k, value in list(result["pass_at"].items())[1:]:
        shown.add_row(f"pass@{k}", f"{value['mean']:.3f}",
                      span(value["interval"], value["interval_method"]))
    if "paired" in result:
        pair = result["paired"]
        shown.add_row("baseline", f"{pair['baseline_accuracy']:.3f}")
        shown.add_row("difference", f"{pair['difference']:+.3f}",
                      span(pair["interval"], pair["interval_method"]))
        shown.add_row("problems better, worse", f"{pair['better']}, {pair['worse']}")
    shown.add_row("tokens/s", f"{result['tokens_per_second']:.1f}")
    shown.add_row("accept length", f"{result['accept_length']:.2f} ({result['drafter']})")
    shown.add_row("mean length", f"{result['mean_length']:.1f} ({result['stopped']:.0%} stopped)")
    return shown


def span(interval: list[float], method: str) -> str:
    """Returns an interval and its method as text."""
    return f"{interval[0]:.3f} .. {interval[1]:.3f} ({method})"


if __name__ == "__main__":
    config_flags.run(main)
