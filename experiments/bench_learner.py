"""Speed of one GRPO update against its FLOP bound, and peak memory of a whole training step.

    python experiments/bench_learner.py
    python experiments/bench_learner.py --packing=group --config.learner.micro_batch=16

First one complete training step of the preset, for its peak memory. Then updates on the sequences
of a rollout of it, at the preset's shapes, every sequence with a gradient: one update of each
packing in turn, in this process. The bound counts 2 FLOPs for each parameter of a matrix product
and token, attention over visible keys, and the head where a response token is predicted, all times
3 for the backward pass, over the best large GEMM. `useful` leaves padding out, `padded` is what the
program runs.
The optimiser's element-wise work is in the time, not in the bound.
"""

import sys
from pathlib import Path
from typing import Any

import config_flags
from absl import flags
from bench import hardware, results, show
from bench.timing import alternate, ratio
from bench.update import Keeper, Update

from specrl_jax.config import Config, ConfigError
from specrl_jax.io.compilation import use_persistent_cache
from specrl_jax.io.memory import peak_rss
from specrl_jax.model import weights
from specrl_jax.rollout.prompts import make_prompts
from specrl_jax.trainer import Trainer

PACKINGS = ("group", "sequence")
PACKING = flags.DEFINE_list("packing", list(PACKINGS), f"some of {', '.join(PACKINGS)}")
REPEATS = flags.DEFINE_integer("repeats", 5, "timed updates of each packing", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_learner.json in "
                          "experiments)")


def main(config: Config, workdir: Path) -> int:
    results.refuse_workdir()
    out = results.destination(OUT.value, "bench_learner.json")
    for name in PACKING.value:
        if name not in PACKINGS:
            raise ConfigError(f"--packing={name}: choose some of {', '.join(PACKINGS)}")
    use_persistent_cache()
    result = bench(config, PACKING.value, REPEATS.value)
    results.write(out, result)
    show.console().print(show.learner_table(result))
    print(f"wrote {out}")
    return 0


def bench(config: Config, packings: list[str], repeats: int) -> dict[str, Any]:
    """Everything that the result file holds."""
    source = weights.describe_source(config.model.path)
    trainer = Trainer(config, source, make_prompts(config, source.tokenizer, _say), _say)
    memory = {"loaded": peak_rss()}
    trainer.compile(_say)
    memory["compiled"] = peak_rss()
    _say("one training step")
    trainer.step()
    memory["step"] = peak_rss()
    rollout, _ = trainer.rollout()
    keeper, found = Keeper(trainer.state), {}
    for name in packings:
        _say(f"compiling the update with packing {name}")
        found[name] = Update(config, source.arch, trainer.mesh, rollout, keeper, name)
    probes = hardware.Probes()
    machine = probes.measure()
    tasks = {name: update.run for name, update in found.items()}
    alternate(tasks, 1)
    _say("timing")
    seconds = alternate(tasks, repeats)
    machine = machine.best(probes.measure())
    memory["benchmark"] = peak_rss()
    return results.blank(config) | {
        "sequences": len(rollout.length), "hardware": hardware.as_json(machine),
        "prompt_tokens": hardware.lengths_summary(rollout.prompt_length),
        "response_tokens": hardware.lengths_summary(rollout.length),
        "cases": {name: update.describe(seconds[name], machine) for name, update in found.items()},
        "ratios": {f"{a}/{b} seconds": ratio(seconds[a], seconds[b])
                   for a, b in (("sequence", "group"),) if {a, b} <= seconds.keys()},
        "peak_rss_bytes": memory}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
