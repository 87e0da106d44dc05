"""Speculation against plain decoding: ReSpec's heat-map (Fig. 7) of rows x (depth, branch, nodes).

    python experiments/bench_speculation.py --drafter=eagle,history,merge \\
        --config.draft.path=runs/drafter/drafter --config.rollout.temperature=0.6 \\
        --config.data.name=gsm8k --config.data.split=test --config.rollout.max_new_tokens=256 \\
        --config.data.system= --config.rollout.max_prompt_tokens=224
    python experiments/bench_speculation.py --batch=1,2,4,8,16,32,64 --repeats=8 \\
        --setting=1x1x2,2x1x3,4x1x5,3x2x7,3x5x8,3x5x16,5x5x8,5x5x16 --drafter=eagle \\
        --config.draft.path=runs/drafter/drafter --config.rollout.temperature=0.6 \\
        --config.data.name=gsm8k --config.data.split=test --config.rollout.max_new_tokens=128 \\
        --config.data.system= --config.rollout.max_prompt_tokens=224 \\
        --config.control.min_survival=0                               # Fig. 7

Prompts are the first --prompts of config.data's split, or one for each row; they end at stop tokens
or at config.rollout.max_new_tokens, and the next one takes the row. For each batch size, plain
decoding and every drafter at every setting are timed alternately in this process, and each drafter
also with nothing drafted (the arm `NAME 0`, what a round pays for a drafter that is switched off)
and under every adaptive policy (`NAME budget`). Told at the end, beside what Fig. 7 says of the
paper's device: the load up to which each setting gains, and mean speeds over the loads of the best
setting for all, of that or off, of the best of each load, and of policies; chosen on even repeats,
judged on odd ones. With --resume the same command goes on with the next batch size.

`history` and `merge` know config.spec.history_past earlier responses to each prompt, as in the
later epochs of RL. Nodes less likely to be accepted than config.control.min_survival are not
verified; 0 verifies whole settings. What drafting takes is the difference of two single runs, so on
a machine whose speed changes its share may even be below zero. Speed-ups are pair by pair. Under
the match rule all arms say the same tokens but for near ties; the file says whether they did.
"""

import sys
from pathlib import Path
from typing import Any

import config_flags
import jax
import run_flags
from absl import flags
from bench import heatmap, results, show, speculation
from bench.speculation import Cell
from bench.timing import ROWS_OF_WEIGHTS, Left
from interrupt import stops

from specrl_jax import sharding
from specrl_jax.config import DRAFTERS, Config, ConfigError
from specrl_jax.io.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.rollout.prompts import make_prompts

BATCH = flags.DEFINE_list("batch", ["1", "2", "4", "8", "16"], "rows of each case")
DRAFTER = flags.DEFINE_list("drafter", ["history"], f"some of {', '.join(DRAFTERS[1:])}")
SETTING = flags.DEFINE_list("setting", ["2x1x3", "4x1x5", "4x2x8"],
                            "depth x branch x nodes of a row, root included")
PROMPTS = flags.DEFINE_integer("prompts", 0, "prompts of each case, at least its rows; 0: as many "
                               "as rows", lower_bound=0)
POLICIES = ("budget", "respec")
POLICY = flags.DEFINE_list("policy", ["budget"], "adaptive policies beside the settings: some of "
                           f"{', '.join(POLICIES)}")
REPEATS = flags.DEFINE_integer("repeats", 4, "timed runs of each arm", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_speculation.json in "
                          "experiments); the heat-map lies beside it as .png")
RESUME = flags.DEFINE_boolean("resume", False, "keep the cases that --out already holds")


def main(config: Config, workdir: Path) -> int:
    with stops(lambda: "stopped; the same command with --resume goes on"):
        return _main(config)


def _main(config: Config) -> int:
    out = results.destination(OUT.value, "bench_speculation.json")
    for name in DRAFTER.value:
        if name not in DRAFTERS[1:]:
            raise ConfigError(f"--drafter={name}: choose some of {', '.join(DRAFTERS[1:])}")
    for name in POLICY.value:
        if name not in POLICIES:
            raise ConfigError(f"--policy={name}: choose some of {', '.join(POLICIES)}")
    cells, batches = [speculation.parse(text) for text in SETTING.value], _batches()
    earlier = results.earlier(out) if RESUME.value else {}
    _refuse_others(out, cells, earlier)
    config, actor = run_flags.resolve(config)
    use_persistent_cache()
    prompts = make_prompts(config, actor.source.tokenizer, _say).tokens
    most = max(*batches, PROMPTS.value)
    if len(prompts) < most:
        raise ConfigError(f"data.split = {config.data.split!r} has {len(prompts)} prompts, --batch "
                          f"and --prompts ask for {most}; give fewer rows or prompts")
    result = results.blank(config)
    result["cases"] = earlier
    params = actor.params(sharding.make_mesh(config.mesh))
    counter, console = CompilationCounter(), show.console()
    missing = [rows for rows in batches if str(rows) not in result["cases"]]
    left = Left(sum(rows + ROWS_OF_WEIGHTS for rows in missing))
    for rows in missing:
        _say(f"{rows} rows, still to do: {missing}, {left}")
        found = speculation.run_case(
            config, actor.source, params, prompts[:max(rows, PROMPTS.value)], rows, DRAFTER.value,
            cells, REPEATS.value, counter, POLICY.value,
            lambda text, rows=rows: _say(f"{rows} rows: {text}"))
        found["command"] = results.command(sys.argv)
        result["cases"][str(rows)] = found
        result["adapting"] = _adapting(result["cases"])
        results.write(out, result)
        left.finished(rows + ROWS_OF_WEIGHTS)
        jax.clear_caches()
    for case in result["cases"].values():
        console.print(show.speculation_table(case))
    console.print(show.adapting_table(_adapting(result["cases"])))
    heatmap.draw(_grids(result["cases"]) | {"ReSpec, Fig. 7 (H100)": heatmap.PAPER},
                 out.with_suffix(".png"))
    print(f"wrote {out} and {out.with_suffix('.png')}")
    return 0


def _refuse_others(out: Path, cells: list[Cell], cases: dict[str, Any]) -> None:
    """
    Raises:
      ConfigError: the file's cases have other arms than are asked for.
    """
    asked = {"off", *(f"{name} {arm}" for name in DRAFTER.value
                      for arm in ("0", *(cell.name for cell in cells), *POLICY.value))}
    for rows, case in cases.items():
        if case["arms"].keys() != asked:
            other = ", ".join(sorted(case["arms"].keys() ^ asked))
            raise ConfigError(f"--out={out}: {rows} rows were timed with other arms ({other}); "
                              "ask for the same ones, or name another file")


def _batches() -> list[int]:
    for value in BATCH.value:
        if not (value.isdigit() and int(value)):
            raise ConfigError(f"--batch={value}: give positive numbers, such as 1,4,16")
    return sorted({int(value) for value in BATCH.value})


def _grids(cases: dict[str, Any]) -> dict[str, heatmap.Grid]:
    """By drafter, of all that every case has."""
    drafters = dict.fromkeys(name.split(" ")[0] for case in cases.values() for name in case["arms"]
                             if name != "off")
    return {name: heatmap.grid_of(cases, name) for name in drafters}


def _adapting(cases: dict[str, Any]) -> dict[str, Any]:
    """What adapting is worth with each drafter, and in the paper."""
    return {name: heatmap.adapting(grid, [p for p in POLICIES if p in next(iter(grid.values()))])
            for name, grid in _grids(cases).items()} | {"paper": heatmap.adapting(heatmap.PAPER)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
