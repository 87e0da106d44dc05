"""Times speculation against plain decoding: ReSpec's heat map (Fig. 7), with policies.

    python experiments/bench.py speculation --batch=1,4,16 --setting=2x1x3,4x2x8
    python experiments/bench.py speculation --batch=1,2,4,8,16,32,64 --drafter=eagle \\
        --config.draft.path=runs/drafter/drafter --config.rollout.temperature=0.6 \\
        --config.data.system="Work through the problem step by step." --resume

Writes results/bench_speculation.json. Every arm decodes the same prompts of config.data in turn:
each drafter at each setting, switched off (`NAME 0`) and under each policy. Settings are chosen on
even repeats and judged on odd ones. Nodes below config.control.min_survival are not verified; 0
verifies whole settings.
"""

import sys
from pathlib import Path
from typing import Any

import jax
from absl import flags
from interrupt import stops

from specrl_jax import sharding
from specrl_jax.config import DRAFTERS, Config, ConfigError
from specrl_jax.data.prompts import make_prompts
from specrl_jax.model.source import Actor
from specrl_jax.runtime.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.runtime.stderr import say

from . import arms, grids, results, tables
from .arms import Cell
from .timing import TimeLeft

NEEDS_MODEL = True
FLAGS = flags.FLAGS
POLICIES = ("budget", "respec")
FIXED_ROWS = 16  # a round takes as long as reading the weights plus this many rows, roughly


def define_flags() -> None:
    """Defines the flags of `bench.py speculation`."""
    results.define_flags(repeats=4)
    flags.DEFINE_list("batch", ["1", "2", "4", "8", "16"], "rows of each case")
    flags.DEFINE_list("drafter", ["history"], f"some of {', '.join(DRAFTERS[1:])}")
    flags.DEFINE_list("setting", ["2x1x3", "4x1x5", "4x2x8"],
                      "depth x branch x nodes per row, root included")
    flags.DEFINE_integer("prompts", 0, "prompts of each case, at least its rows; 0 is as many as "
                         "rows", lower_bound=0)
    flags.DEFINE_list("policy", ["budget"], f"policies: some of {', '.join(POLICIES)}")
    flags.DEFINE_boolean("resume", False, "keep the cases that --out already holds")


def main(config: Config, actor: Actor) -> int:
    """Runs the cases that the flags name; returns the exit status."""
    with stops(lambda: "stopped; the same command with --resume goes on"):
        return run(config, actor)


def run(config: Config, actor: Actor) -> int:
    """Runs the cases that the flags name; returns the exit status."""
    out = results.destination(FLAGS.out, "bench_speculation.json")
    results.among("drafter", FLAGS.drafter, DRAFTERS[1:])
    results.among("policy", FLAGS.policy, POLICIES)
    cells = [arms.parse(text) for text in FLAGS.setting]
    batches = sorted(set(results.positive("batch", FLAGS.batch)))
    result = results.blank(config)
    result["cases"] = results.earlier(out) if FLAGS.resume else {}
    refuse_other_arms(out, cells, result["cases"])
    use_persistent_cache()
    prompts = make_prompts(config, actor.source.tokenizer, say).tokens
    most = max(*batches, FLAGS.prompts)
    if len(prompts) < most:
        raise ConfigError(f"data.split = {config.data.split!r} has {len(prompts)} prompts, --batch "
                          f"and --prompts ask for {most}; give fewer rows or prompts")
    params, counter = actor.params(sharding.make_mesh(config.mesh)), CompilationCounter()
    missing = [rows for rows in batches if str(rows) not in result["cases"]]
    left = TimeLeft(sum(rows + FIXED_ROWS for rows in missing))
    for rows in missing:
        say(f"{rows} rows, {left}")
        result["cases"][str(rows)] = arms.run_case(
            config, actor.source, params, prompts[:max(rows, FLAGS.prompts)], rows, FLAGS.drafter,
            cells, FLAGS.repeats, counter, FLAGS.policy,
            lambda text, rows=rows: say(f"{rows} rows: {text}")) | {
            "command": results.command(sys.argv)}
        result["adapting"] = adapting(result["cases"])
        results.write(out, result)
        left.finished(rows + FIXED_ROWS)
        jax.clear_caches()
    show(result["cases"], out)
    return 0


def show(cases: dict[str, Any], out: Path) -> None:
    """Prints the tables."""
    console = tables.console()
    for case in cases.values():
        console.print(tables.speculation_table(case))
    console.print(tables.adapting_table(adapting(cases)))
    print(f"wrote {out}")


def refuse_other_arms(out: Path, cells: list[Cell], cases: dict[str, Any]) -> None:
    """
    Raises:
      ConfigError: the file's cases have other arms than the flags ask for.
    """
    wanted = {"off", *(f"{name} {arm}" for name in FLAGS.drafter
                       for arm in ("0", *(cell.name for cell in cells), *FLAGS.policy))}
    for rows, case in cases.items():
        if case["arms"].keys() != wanted:
            other = ", ".join(sorted(case["arms"].keys() ^ wanted))
            raise ConfigError(f"--out={out}: {rows} rows were timed with other arms ({other}); "
                              "ask for the same ones, or name another file")


def by_drafter(cases: dict[str, Any]) -> dict[str, grids.Grid]:
    """Returns the grid of each drafter, of the arms that every case has."""
    drafters = dict.fromkeys(name.split(" ")[0] for case in cases.values() for name in case["arms"]
                             if name != "off")
    return {name: grids.grid_of(cases, name) for name in drafters}


def adapting(cases: dict[str, Any]) -> dict[str, Any]:
    """Returns the gain from adapting to the load with each drafter, and in the paper."""
    return {name: grids.adapting(grid, [p for p in POLICIES if p in next(iter(grid.values()))])
            for name, grid in by_drafter(cases).items()} | {"paper": grids.adapting(grids.PAPER)}
