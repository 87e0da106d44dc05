"""Adaptive policies against off and every fixed setting: load x context x drafter x lengths.

    python experiments/bench_controller.py                      # --preset=small, within 90 minutes
    python experiments/bench_controller.py --preset=small --cells=4x64-0-uniform,4x64-1-heavy
    python experiments/bench_controller.py --preset=smollm2 --config=smollm2 --seconds=900 \\
        --config.spec.drafter=eagle --config.draft.path=runs/drafter/drafter \\
        --config.rollout.temperature=0.6 --config.rollout.max_prompt_tokens=224 \\
        --config.data.name=gsm8k --config.data.split=test --config.data.system=

`small` replays recorded streams of a random model, spoilt with probability 0, 0.4 or 1, and rows
end at limits; `smollm2` drafts with config.spec.drafter on real prompts. Arms are timed alternately
in this process, without prefill, which is the same for all. The best fixed setting of a cell, off
included, is chosen on runs of its own, timed with all arms, and then by turns with budget alone,
until that ratio is known. The cell 64x64-own-stop is a whole
rollout: its rows end where the actor ends them, and the picture shows its active rows, verified
tokens and tokens/s over time. On a CPU, 64 rows take six engines of 17,000 memory maps, more than
Linux allows at first: `sysctl -w vm.max_map_count=262144`. Each cell is written when it is done;
the same command with --resume keeps those that --out holds.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import config_flags
import jax
import run_flags
from absl import flags
from bench import controller, controller_stats, results, show
from bench.controller import Cell, Shape
from bench.timing import Left
from interrupt import stops
from rich.table import Table

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError
from specrl_jax.host.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.loop import make_prompts
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.tiny import byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source

PRESET = flags.DEFINE_enum("preset", "small", ["small", "smollm2"], "which cells, of which model")
CELLS = flags.DEFINE_list("cells", [], "names of cells; none is all of the preset")
POLICIES = flags.DEFINE_list("policies", list(controller.POLICIES),
                             f"some of {', '.join(controller.POLICIES)}; budget is needed")
REPEATS = flags.DEFINE_integer("repeats", 3, "runs of each fixed setting to choose the best by, "
                               "and of each arm to time it by", lower_bound=2)
PRECISE = flags.DEFINE_float("precise", 0.03, "half-width of budget's 95 % interval at which a "
                             "cell ends", lower_bound=0)
SECONDS = flags.DEFINE_float("seconds", 100, "of timed runs, after which a cell ends however wide "
                             "the interval is", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_controller_PRESET.json "
                          "in experiments); the picture lies beside it as .png")
RESUME = flags.DEFINE_boolean("resume", False, "keep the cells that --out already holds")

SMALL = Architecture(vocab_size=8192, hidden_size=768, intermediate_size=2048, num_layers=4,
                     num_heads=12, num_kv_heads=4, head_dim=64, max_position=4096)
SMALL_TOKENS = {1: 192, 4: 96, 16: 48, 64: 24}  # of a uniform row, by rows
SMOLLM2_TOKENS = {1: 96, 4: 96, 16: 64, 64: 128}  # half of what a row of another length may have


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
    cells = controller.pick(controller.SMALL if small else controller.SMOLLM2, CELLS.value)
    out = results.destination(OUT.value, f"bench_controller_{PRESET.value}.json")
    use_persistent_cache()
    bench = _small(config) if small else _smollm2(config)
    result = results.blank(bench.config) | {"architecture": dataclasses.asdict(bench.source.arch)}
    if RESUME.value:
        result["cases"] = results.earlier(
            out, config=result["config"], architecture=result["architecture"])
    shapes: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        if cell.name not in result["cases"]:
            shapes.setdefault((cell.rows, cell.context), []).append(cell)
    left = Left(sum(map(len, shapes.values())))
    for (rows, context), of_shape in shapes.items():
        _say(f"{rows} rows, context {context}: compiling and measuring")
        shape = bench.shape(rows, context)
        for cell in of_shape:
            done = sum(other.name in result["cases"] for other in cells)
            _say(f"{cell.name}, cell {done + 1} of {len(cells)}, {left}")
            found = controller.run_cell(
                shape, cell, REPEATS.value, PRECISE.value, SECONDS.value, _say)
            result["cases"][cell.name] = found | {"command": results.command(sys.argv)}
            result["summary"] = controller_stats.summarize(result["cases"])
            results.write(out, result)
            left.finished(1)
        del shape
        jax.clear_caches()
    show.console().print(table(result["cases"]))
    controller_stats.draw(result["cases"], out.with_suffix(".png"))
    print(f"wrote {out} and {out.with_suffix('.png')}")
    return 0


class Bench:
    """A model, its prompts, and how shapes of it are made.

    Args:
      tokens: of a uniform row, by rows.
    """

    def __init__(self, config: Config, source: Source, params: Any, stop: Sequence[int],
                 drafter: str, prompts: Sequence[Sequence[int]] | None,
                 tokens: Mapping[int, int]) -> None:
        self.config, self.source, self.params, self.stop = config, source, params, stop
        self.drafter, self.prompts, self.counter = drafter, prompts, CompilationCounter()
        self.tokens = tokens

    def shape(self, rows: int, context: int) -> Shape:
        config = dataclasses.replace(self.config, rollout=dataclasses.replace(
            self.config.rollout, max_new_tokens=self.tokens[rows]))
        return Shape(config, self.source, self.params, self._prompts(rows, context), self.stop,
                     self.drafter, POLICIES.value, self.counter)

    def _prompts(self, rows: int, context: int) -> list[list[int]]:
        """One prompt for all rows, or real ones; several behind each other for a long context.

        Raises:
          ConfigError: there are too few.
        """
        if self.prompts is None:
            return [[(7 * i) % 256 for i in range(context)]] * rows
        found, rest = [], iter(self.prompts)
        for _ in range(rows):
            tokens: list[int] = []
            while len(tokens) < context // 2 or not tokens:
                tokens += next(rest, [])
                if not tokens:
                    raise ConfigError(f"data.split = {self.config.data.split!r}: "
                                      f"{len(self.prompts)} prompts are too few for {rows} rows")
            found.append(tokens[-2 * context:])
        return found


def _small(config: Config) -> Bench:
    """Random weights; everything but sizes and policies' options is fixed."""
    source = Source(SMALL, byte_tokenizer(), random_tensors(SMALL, 0), "random")
    rollout = dataclasses.replace(config.rollout, temperature=1.0, top_k=0, top_p=1.0)
    config = dataclasses.replace(config, rollout=rollout)
    return Bench(config, source, jax.device_put(source.params()), (), "replay", None, SMALL_TOKENS)


def _smollm2(config: Config) -> Bench:
    config, actor = run_flags.resolve(config)
    prompts = make_prompts(config, actor.source.tokenizer, _say).tokens
    return Bench(config, actor.source, actor.params(sharding.make_mesh(config.mesh)),
                 actor.source.tokenizer.stop_ids, config.spec.drafter, prompts,
                 SMOLLM2_TOKENS)


def table(cases: dict[str, Any]) -> Table:
    """Each policy's speed over the best fixed setting."""
    found = Table(title="speed over the best fixed setting, with its 95 % interval")
    names = [n for n in controller.POLICIES if any(n in c["arms"] for c in cases.values())]
    for column in ("cell", "best fixed", "off", *names, "equal", "compilations"):
        found.add_column(column, justify="right", no_wrap=column == "cell")
    for name, case in cases.items():
        shown = [f"{a['ratio']:.3f} ({a['low']:.3f} .. {a['high']:.3f})"
                 for a in (case["arms"][n] for n in ("off", *names))]
        found.add_row(name, case["best_fixed"], *shown,
                      "yes" if all(case["equal_tokens"].values()) else "no",
                      str(case["compilations"]))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
