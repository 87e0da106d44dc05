"""Times controllers against off and every fixed setting: load x context x drafter x lengths.

    python experiments/bench.py controller --preset=small --cells=4x64-0-uniform,4x64-1-heavy
    python experiments/bench.py controller --preset=smollm2 --config=smollm2 --repeats=2 \\
        --config.spec.drafter=eagle --config.draft.path=runs/drafter/drafter \\
        --config.rollout.temperature=0.6 --config.rollout.max_prompt_tokens=224 \\
        --config.data.name=gsm8k --config.data.split=test --config.data.system= \\
        --config.data.examples=0

`small` replays recorded streams of a random model, spoilt with probability 0, 0.4 or 1, and rows
end at limits; `smollm2` drafts with config.spec.drafter on real prompts. A cell's best fixed
setting, off included, is chosen on half of the loads; all arms are timed by turns on the other
half, without prefill. Each cell is written when it is done; --resume keeps those that --out holds.
"""

import sys
from pathlib import Path

import jax
import run_flags
from absl import flags
from bench import results, tables
from bench.timing import TimeLeft
from interrupt import stops
from rich.table import Table

from specrl_jax.config import Config
from specrl_jax.runtime.compilation import use_persistent_cache

from . import controller_cells, controller_runs, controller_stats

PRESET = flags.DEFINE_enum("preset", "small", ["small", "smollm2"], "which cells, of which model")
CELLS = flags.DEFINE_list("cells", [], "names of cells; none is all of the preset")
POLICIES = flags.DEFINE_list("policies", list(controller_runs.POLICIES),
                             "values of control.policy to time")
REPEATS = flags.DEFINE_integer("repeats", 3, "runs of each fixed setting to choose the best by, "
                               "and of each arm to time it by", lower_bound=2)
SECONDS = flags.DEFINE_float("seconds", 20, "of further pairs of budget and the best fixed "
                             "setting, a cell", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_controller_PRESET.json "
                          "in experiments)")
RESUME = flags.DEFINE_boolean("resume", False, "keep the cells that --out already holds")


def main(config: Config, workdir: Path) -> int:
    with stops(lambda: "stopped; the same command with --resume goes on"):
        return _main(config)


def _main(config: Config) -> int:
    by_sizes = controller_cells.pick(PRESET.value, CELLS.value)
    out = results.destination(OUT.value, f"bench_controller_{PRESET.value}.json")
    use_persistent_cache()
    bench = controller_cells.small(config) if PRESET.value == "small" else controller_cells.real(
        *run_flags.resolve(config), _say)
    result = results.blank(bench.config) | {
        "preset": PRESET.value, "policies": POLICIES.value, "version": controller_cells.VERSION}
    if RESUME.value:
        result["cases"] = results.earlier(out, config=result["config"], preset=PRESET.value,
                                          policies=POLICIES.value, version=result["version"])
    cases = result["cases"]
    todo = {sizes: some for sizes, cells in by_sizes.items()
            if (some := [cell for cell in cells if cell.name not in cases])}
    left = TimeLeft(sum(map(len, todo.values())))
    for sizes, cells in todo.items():
        _say(f"{sizes[0]} rows: compiling and measuring")
        shape = controller_runs.Shape(bench, sizes, POLICIES.value)
        for cell in cells:
            _say(f"{cell.name}, {left}")
            case = controller_runs.run_cell(shape, cell, REPEATS.value, SECONDS.value, _say)
            cases[cell.name] = case | {"arms": controller_stats.arms(case)}
            result["summary"] = controller_stats.summarize(cases)
            results.write(out, result)
            left.finished(1)
        del shape
        jax.clear_caches()
    tables.console().print(table(cases))
    print(f"wrote {out}")
    return 0


def table(cases: dict) -> Table:
    """Returns each policy's speed over the best fixed setting."""
    made = Table(title="speed over the best fixed setting, with its 95 % interval")
    names = ["off", *dict.fromkeys(n for case in cases.values() for n in case["explained"])]
    for column in ("cell", "best fixed", *names, "equal", "compilations"):
        made.add_column(column, justify="right", no_wrap=column == "cell")
    for name, case in cases.items():
        shown = [f"{a['ratio']:.3f} ({a['low']:.3f} .. {a['high']:.3f})"
                 for a in map(case["arms"].get, names) if a]
        made.add_row(name, case["best_fixed"], *shown, "yes" if case["equal_tokens"] else "no",
                     str(case["compilations"]))
    return made


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
