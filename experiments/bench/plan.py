"""Whether plan.py ranks runs as a machine does: eight configs on one device, a few steps each.

Each is trained for --repeats steps after one that is not counted; the fastest is compared with the
prediction, over the lengths that the runs themselves recorded. Seconds are those of the process's
CPU, which other work on the machine does not change. The drafter trains but does not draft: an
untrained one would not pay, and what drafts save is measured by `bench.py speculation`.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table
from scipy import stats

from specrl_jax.config import Config, override
from specrl_jax.runtime.hardware import Chip
from specrl_jax.structs import Json
from specrl_jax.training.trainer import Trainer

from . import results
from .hardware import Hardware, probes_here
from .planning import predict
from .planning.predict import Machine
from .planning.traces import Trace
from .planning.work import Model

NEEDS_MODEL = False
ROUND_SECONDS = 1e-3  # of a round's small operations on a CPU
BASE = {"model.path": "random:deep", "prompts_per_step": 4, "group_size": 4,
        "learner.packing": "sequence", "control.policy": "off"}
DRAFTER = {"spec.drafter": "eagle", "control.policy": "fixed", "spec.depth": 0,
           "distill.when": "interval", "distill.batch": 16, "distill.micro_batch": 4,
           "distill.updates": 2}
CASES: dict[str, dict[str, Any]] = {  # rows, micro-batch, longest response, further fields
    f"{rows} rows, micro-batch {micro}, {longest} tokens" + ", drafter" * bool(more): {
        "rollout.batch_size": rows, "rollout.min_batch": rows, "spec.max_packed": rows,
        "learner.micro_batch": micro,
        "rollout.max_new_tokens": longest, "spec.drafter": "off", **more}
    for rows, micro, longest, more in (
        (16, 16, 32, {}), (4, 16, 32, {}), (1, 16, 32, {}), (4, 4, 32, {}), (4, 16, 32, DRAFTER),
        (16, 16, 96, {}), (4, 4, 96, {}), (16, 4, 96, DRAFTER))}


def define_flags() -> None:
    """Defines --out and --repeats."""
    results.define_flags(repeats=3)


def main(config: Config, workdir: Path) -> int:
    del workdir
    path = results.destination(flags.FLAGS.out, "bench_plan_cpu.json")
    result = results.blank(config)
    probes = probes_here(tiny=False)
    limits = probes.measure()
    runs = {name: run(override(config, BASE | case), flags.FLAGS.repeats)
            for name, case in CASES.items()}
    limits = limits.best(probes.measure())
    for name, found in runs.items():
        predicted = prediction(*found, limits)
        result["cases"][name] = {
            "measured": min(found[1]), "steps": found[1], "predicted": predicted.seconds,
            "parts": dict(predicted.parts)}
    pairs = [(case["measured"], case["predicted"]) for case in result["cases"].values()]
    result["rank_correlation"] = float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)
    result["limits"] = {"flops": limits.peak, "bandwidth": limits.bandwidth}
    results.write(path, result)
    Console().print(table(result))
    print(f"rank correlation {result['rank_correlation']:.2f}; wrote {path}")
    return 0


def run(config: Config, repeats: int) -> tuple[Model, list[float], Trace]:
    """Trains for a few steps; returns the run's sizes, the CPU seconds of each, and the lengths."""
    trainer = Trainer.from_config(config)
    trainer.compile(lambda text: None)
    lengths, seconds = [], []
    for _ in range(1 + repeats):
        began = time.process_time()
        _, samples = trainer.step()
        seconds.append(time.process_time() - began)
        lengths += [len(sample["tokens"]) for sample in samples]
    return Model(config, trainer.arch), seconds[1:], Trace("measured", np.asarray(lengths), (0.0,))


def prediction(model: Model, seconds: list[float], trace: Trace, limits: Hardware) -> predict.Step:
    """Returns what plan.py predicts for a run on this machine."""
    del seconds
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    chip = Chip("cpu", "cpu", 1, limits.peak, limits.bandwidth, memory)
    return predict.step(model, Machine(chip, 1, round_seconds=ROUND_SECONDS), trace)


def table(result: Json) -> Table:
    """Returns measured and predicted seconds, a line a case."""
    made = Table("case", "measured s", "predicted s")
    for name, case in sorted(result["cases"].items(), key=lambda item: item[1]["measured"]):
        made.add_row(name, f"{case['measured']:.2f}", f"{case['predicted']:.2f}")
    return made
