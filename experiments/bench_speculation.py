"""Speculation against plain decoding: the heat-map of batch x (depth, branch, nodes).

    python experiments/bench_speculation.py --drafter=eagle,history,merge \\
        --config.draft.path=runs/drafter/drafter --config.rollout.temperature=0.6 \\
        --config.data.name=gsm8k --config.data.split=test --config.rollout.max_new_tokens=256

Prompts are the first --prompts of config.data's split, or one for each row; they end at stop tokens
or at config.rollout.max_new_tokens, and the next one takes the row. For each batch size, plain
decoding and every drafter at every setting are timed alternately in this process, and each drafter
also with nothing drafted (the arm `NAME 0`, what a round pays for a drafter that is switched off).
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
from bench import results, show, speculation
from matplotlib.figure import Figure

from specrl_jax import sharding
from specrl_jax.config import DRAFTERS, Config, ConfigError
from specrl_jax.host.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.loop import make_prompts

BATCH = flags.DEFINE_list("batch", ["1", "2", "4", "8", "16"], "rows of each case")
DRAFTER = flags.DEFINE_list("drafter", ["history"], f"some of {', '.join(DRAFTERS[1:])}")
SETTING = flags.DEFINE_list("setting", ["2x1x3", "4x1x5", "4x2x8"],
                            "depth x branch x nodes of a row, root included")
PROMPTS = flags.DEFINE_integer("prompts", 0, "prompts of each case, at least its rows; 0: as many "
                               "as rows", lower_bound=0)
REPEATS = flags.DEFINE_integer("repeats", 3, "timed runs of each arm", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_speculation.json in "
                          "experiments); the heat-map lies beside it as .png")
RESUME = flags.DEFINE_boolean("resume", False, "keep the cases that --out already holds")


def main(config: Config, workdir: Path) -> int:
    out = results.destination(OUT.value, "bench_speculation.json")
    for name in DRAFTER.value:
        if name not in DRAFTERS[1:]:
            raise ConfigError(f"--drafter={name}: choose some of {', '.join(DRAFTERS[1:])}")
    cells, batches = [speculation.parse(text) for text in SETTING.value], _batches()
    config, actor = run_flags.resolve(config)
    use_persistent_cache()
    prompts = make_prompts(config, actor.source.tokenizer, _say).tokens
    most = max(*batches, PROMPTS.value)
    if len(prompts) < most:
        raise ConfigError(f"data.split = {config.data.split!r} has {len(prompts)} prompts, --batch "
                          f"and --prompts ask for {most}; give fewer rows or prompts")
    result = results.blank(config)
    if RESUME.value:
        result["cases"] = results.earlier(out)
    params = actor.params(sharding.make_mesh(config.mesh))
    counter, console = CompilationCounter(), show.console()
    for rows in batches:
        if str(rows) not in result["cases"]:
            _say(f"{rows} rows: {', '.join(DRAFTER.value)}")
            found = speculation.run_case(config, actor.source, params,
                                         prompts[:max(rows, PROMPTS.value)], rows, DRAFTER.value,
                                         cells, REPEATS.value, counter)
            found["command"] = results.command(sys.argv)
            result["cases"][str(rows)] = found
            results.write(out, result)
            jax.clear_caches()
        console.print(show.speculation_table(result["cases"][str(rows)]))
    draw(result["cases"], out.with_suffix(".png"))
    print(f"wrote {out} and {out.with_suffix('.png')}")
    return 0


def _batches() -> list[int]:
    for value in BATCH.value:
        if not (value.isdigit() and int(value)):
            raise ConfigError(f"--batch={value}: give positive numbers, such as 1,4,16")
    return sorted({int(value) for value in BATCH.value})


def draw(cases: dict[str, Any], path: Path) -> None:
    """The heat-map: median speed-up of each arm at each batch size."""
    rows = sorted(cases, key=int)
    arms = [name for name in cases[rows[0]]["arms"] if name != "off"]
    table = [[cases[r]["arms"][arm]["speedup"]["median"] for r in rows] for arm in arms]
    figure = Figure(figsize=(1.5 + len(rows), 1.5 + 0.4 * len(arms)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(table, cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto")
    axes.set_xticks(range(len(rows)), rows)
    axes.set_yticks(range(len(arms)), arms)
    axes.set_xlabel("rows")
    axes.set_title("tokens/s over plain decoding")
    for y, line in enumerate(table):
        for x, value in enumerate(line):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center")
    figure.savefig(path, dpi=80)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
