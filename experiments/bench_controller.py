"""Adaptive policies against off and every fixed setting: load x context x drafter x lengths.

    python experiments/bench_controller.py          # --preset=small; 70 minutes on 2 fast cores
    python experiments/bench_controller.py --preset=small --cells=4x64-0-uniform,4x64-1-heavy
    python experiments/bench_controller.py --preset=smollm2 --config=smollm2 --repeats=2 \\
        --config.spec.drafter=eagle --config.draft.path=runs/drafter/drafter \\
        --config.rollout.temperature=0.6 --config.rollout.max_prompt_tokens=224 \\
        --config.data.name=gsm8k --config.data.split=test --config.data.system= \\
        --config.data.examples=0

`small` replays recorded streams of a random model, spoilt with probability 0, 0.4 or 1, and rows
end at limits; one engine holds both contexts. `smollm2` drafts with config.spec.drafter on real
prompts. Arms are timed alternately in this process, without prefill, which is the same for all. The
best fixed setting of a cell, off included, is chosen on runs of its own (three times as many of
those within 10 % of the fastest), timed with all arms, and then by turns with budget alone. What is
timed was not chosen by: half of the loads, which are other noise, and other prompts of smollm2,
choose and teach, the other half is timed, the next one in each repeat (small has 4 and 4, smollm2
16 and 16 or as many as the prompts make: the preset's 64 of them make 2 and 2 of 16 rows).
Runs that follow each other share what others do on the machine, so with --occasions above 1 these
two are timed anew on each further one, minutes later and with costs measured for it: an occasion is
one value, the median of its pairs (of a later one at least four), and there are up to twelve times
as many until the ratio is known; else they run on until their pairs tell it. On each further
occasion smollm2 makes their engines anew, beside no others: engines of the same operations differ
by up to 3 %, and six of 64 rows fill 24 GB. As that takes minutes, pairs go on there until
--seconds have gone (four of 64 rows take longer). The runs that choose teach oracle what each
setting gives and takes. The ceiling is what the chain that gives most tokens per second would give
in each round if it were known before how many of its drafts are accepted, by what rounds took in
those runs; no policy can know, yet trees, or rounds for the longest row, may give more. The cell
64x64-own-stop is a whole rollout: its rows end where the actor ends them, at 512 tokens at the
latest, with weights and the smallest batch of config, and the picture shows its active rows, chosen
nodes and tokens/s over time. On a CPU, an engine of 64 rows has 17,000 memory maps, and there are
more of them than Linux allows at first: `sysctl -w vm.max_map_count=1048576`. Each cell is written
when it is done; the same command with --resume keeps those that --out holds, and goes on with
occasions.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import config_flags
import jax
import run_flags
from absl import flags
from bench import (
    controller,
    controller_cells,
    controller_models,
    controller_stats,
    results,
    tables,
)
from bench.controller_cells import Cell, Sizes
from bench.controller_shape import Shape
from bench.timing import TimeLeft
from interrupt import stops
from rich.table import Table

from specrl_jax.config import Config, ConfigError
from specrl_jax.io.compilation import use_persistent_cache

PRESET = flags.DEFINE_enum("preset", "small", ["small", "smollm2"], "which cells, of which model")
CELLS = flags.DEFINE_list("cells", [], "names of cells; none is all of the preset")
POLICIES = flags.DEFINE_list("policies", list(controller.POLICIES),
                             f"some of {', '.join(controller.POLICIES)}; budget is needed")
REPEATS = flags.DEFINE_integer("repeats", 3, "runs of each fixed setting to choose the best by, "
                               "and of each arm to time it by", lower_bound=2)
PRECISE = flags.DEFINE_float("precise", 0.03, "half-width of budget's 95 % interval at which a "
                             "cell ends", lower_bound=0)
SECONDS = flags.DEFINE_float("seconds", 90, "of timed runs: at most, of a cell of one occasion "
                             "after those that choose; at least, on each further occasion of "
                             "smollm2, which makes engines for it; small has but four pairs there",
                             lower_bound=0)
OCCASIONS = flags.DEFINE_integer("occasions", 4, "on which budget and the best fixed "
                                 "setting are timed, and up to twelve times as many until "
                                 "--precise is reached; on one alone, for at most --seconds",
                                 lower_bound=1)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_controller_PRESET.json "
                          "in experiments); the picture lies beside it as .png")
RESUME = flags.DEFINE_boolean("resume", False, "keep the cells that --out already holds, and "
                             "go on with their occasions")


def main(config: Config, workdir: Path) -> int:
    with stops(lambda: "stopped; the same command with --resume goes on"):
        return _main(config)


def _main(config: Config) -> int:
    for name in POLICIES.value:
        if name not in controller.POLICIES:
            raise ConfigError(f"--policies={name}: choose some of "
                              f"{', '.join(controller.POLICIES)}")
    if "budget" not in POLICIES.value:
        raise ConfigError(f"--policies={','.join(POLICIES.value)}: budget is what is compared")
    small = PRESET.value == "small"
    cells = controller_cells.pick(controller_cells.SMALL if small else controller_cells.SMOLLM2,
                                  CELLS.value)
    out = results.destination(OUT.value, f"bench_controller_{PRESET.value}.json")
    use_persistent_cache()
    bench = controller_models.small(config, POLICIES.value) if small else controller_models.real(
        *run_flags.resolve(config), POLICIES.value, _say)
    result = results.blank(bench.config) | {
        "architecture": dataclasses.asdict(bench.source.arch),
        "loads": controller_models.LOADS[PRESET.value], "version": controller_cells.VERSION}
    if RESUME.value:
        result["cases"] = results.earlier(
            out, config=result["config"], architecture=result["architecture"],
            loads=result["loads"], version=result["version"])
    occasions = OCCASIONS.value
    todo = [cell for cell in cells if cell.name not in result["cases"]]
    shapes: dict[Sizes, Shape] | None = {} if small else None  # to be timed again
    left = TimeLeft(len(todo))
    for sizes, of_shape in by_sizes(todo).items():
        contexts = " and ".join(map(str, sizes[1]))
        _say(f"{sizes[0]} rows, context {contexts}: compiling and measuring")
        shape = bench.shape(*sizes)
        for cell in of_shape:
            done = sum(other.name in result["cases"] for other in cells)
            _say(f"{cell.name}, cell {done + 1} of {len(cells)}, {left}")
            found = controller.run_cell(shape, cell, REPEATS.value, PRECISE.value,
                                        SECONDS.value if occasions == 1 else 0.0, _say)
            result["cases"][cell.name] = found | {name: result[name]
                                                  for name in ("command", "machine")}
            result["summary"] = controller_stats.summarize(result["cases"])
            results.write(out, result)
            left.finished(1)
        if shapes is not None and occasions > 1:
            shape.keep(["budget"])
            shapes[sizes] = shape
        del shape
        jax.clear_caches()
    while fought_again(bench, shapes, cells, result, occasions, out):
        pass
    tables.console().print(table(result["cases"]))
    controller_stats.draw(result["cases"], out.with_suffix(".png"))
    print(f"wrote {out} and {out.with_suffix('.png')}")
    return 0


def by_sizes(cells: list[Cell]) -> dict[Sizes, list[Cell]]:
    """The cells that share engines."""
    found: dict[Sizes, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.sizes, []).append(cell)
    return found


def fought_again(bench: controller_models.Bench,
                 shapes: dict[Sizes, Shape] | None, cells: list[Cell],
                 result: dict[str, Any], occasions: int, out: Path) -> bool:
    """Times budget against the best fixed setting of each cell that is not known yet once more;
    whether there was any. Shapes that are missing are made, and kept if `shapes` is a place."""
    cases = result["cases"]
    todo = [c for c in cells if controller_stats.uncertain(cases[c.name], occasions, PRECISE.value)]
    left = TimeLeft(len(todo))
    for sizes, of_shape in by_sizes(todo).items():
        shape = (shapes or {}).get(sizes) or bench.shape(*sizes, ["budget"])
        shape.price_rounds()
        for cell in of_shape:
            case = cases[cell.name]
            done = 1 + len(case.get("later", ()))
            _say(f"{cell.name}, occasion {1 + done}, {left}")
            runs = controller.fight(shape, cell, case["best_fixed"], done,
                                    SECONDS.value if shapes is None else 0.0)
            case["equal_tokens"]["budget"] &= controller.same(runs)
            cases[cell.name] = controller_stats.fought(case, controller.times(runs)) | {
                "compilations": case["compilations"] + sum(
                    run.compilations for of in runs.values() for run in of)} | (
                {} if case.get("command") == result["command"] else
                {f"later_{name}": result[name] for name in ("command", "machine")})
            result["summary"] = controller_stats.summarize(cases)
            results.write(out, result)
            left.finished(1)
        if shapes is not None:
            shapes[sizes] = shape
        del shape
        jax.clear_caches()
    return bool(todo)


def table(cases: dict[str, Any]) -> Table:
    """Each policy's speed over the best fixed setting."""
    found = Table(title="speed over the best fixed setting, with its 95 % interval")
    names = [n for n in controller.POLICIES if any(n in c["arms"] for c in cases.values())]
    for column in ("cell", "best fixed", "off", *names, "ceiling", "equal", "compilations"):
        found.add_column(column, justify="right", no_wrap=column == "cell")
    for name, case in cases.items():
        shown = [f"{a['ratio']:.3f} ({a['low']:.3f} .. {a['high']:.3f})"
                 for a in (case["arms"][n] for n in ("off", *names))]
        found.add_row(name, case["best_fixed"], *shown,
                      f"{case['ceiling']:.3f}" if "ceiling" in case else "",
                      "yes" if all(case["equal_tokens"].values()) else "no",
                      str(case["compilations"]))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
