"""Times one policy update against its FLOP bound, and measures a training step's peak memory.

    python experiments/bench.py learner
    python experiments/bench.py learner --packing=group --config.learner.micro_batch=16

Writes results/bench_learner.json. Updates run on the sequences of a real rollout of the preset,
each with a gradient, one packing after the other in turn. The bound is three times the forward
FLOPs of matrix products, visible attention and needed logits, over the fastest large product.
"""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.data.prompts import make_prompts
from specrl_jax.metrics.progress import say
from specrl_jax.model import weights
from specrl_jax.rl import learner
from specrl_jax.rl.batch import Batch, Totals, layout_of, make_batch
from specrl_jax.rl.learner import LearnerState
from specrl_jax.runtime.compilation import use_persistent_cache
from specrl_jax.runtime.machine import peak_rss
from specrl_jax.structs import Rollout
from specrl_jax.training.trainer import Trainer

from . import hardware, results, roofline, tables
from .hardware import Hardware
from .timing import alternate, ratio, spread

NEEDS_MODEL = False
FLAGS = flags.FLAGS
PACKINGS = ("group", "sequence")


def define_flags() -> None:
    """Defines the flags of `bench.py learner`."""
    results.define_flags(repeats=5)
    flags.DEFINE_list("packing", list(PACKINGS), f"some of {', '.join(PACKINGS)}")


def main(config: Config, workdir: Path) -> int:
    """Runs the benchmark; returns the exit status."""
    out = results.destination(FLAGS.out, "bench_learner.json")
    results.among("packing", FLAGS.packing, PACKINGS)
    use_persistent_cache()
    result = measure(config, FLAGS.packing, FLAGS.repeats)
    results.write(out, result)
    tables.console().print(tables.learner_table(result))
    print(f"wrote {out}")
    return 0


def measure(config: Config, packings: list[str], repeats: int) -> dict[str, Any]:
    """Returns the whole result."""
    source = weights.describe_source(config.model.path)
    trainer = Trainer(config, source, make_prompts(config, source.tokenizer, say), say)
    memory = {"loaded": peak_rss()}
    trainer.compile(say)
    memory["compiled"] = peak_rss()
    say("one training step")
    trainer.step()
    memory["step"] = peak_rss()
    rollout, _ = trainer.rollout()
    keeper, updates = Keeper(trainer.state), {}
    for name in packings:
        say(f"compiling the update with packing {name}")
        updates[name] = Update(config, trainer, rollout, keeper, name)
    probes = hardware.Probes()
    machine = probes.measure()
    tasks = {name: update.run for name, update in updates.items()}
    alternate(tasks, 1)
    say("timing")
    seconds = alternate(tasks, repeats)
    machine = machine.best(probes.measure())
    memory["benchmark"] = peak_rss()
    return results.blank(config) | {
        "sequences": len(rollout.length), "hardware": dataclasses.asdict(machine),
        "prompt_tokens": hardware.lengths_summary(rollout.prompt_length),
        "response_tokens": hardware.lengths_summary(rollout.length),
        "cases": {name: update.describe(seconds[name], machine)
                  for name, update in updates.items()},
        "ratios": {"sequence/group seconds": ratio(seconds["sequence"], seconds["group"])}
        if len(packings) == len(PACKINGS) else {},
        "peak_rss_bytes": memory}


class Keeper:
    """Holds the learner state that all updates read, donate and replace."""

    def __init__(self, state: LearnerState) -> None:
        self.state = state


class Update:
    """A compiled policy update."""

    def __init__(self, config: Config, trainer: Trainer, rollout: Rollout, keeper: Keeper,
                 packing: str) -> None:
        arch, mesh = trainer.arch, trainer.mesh
        config = dataclasses.replace(
            config, learner=dataclasses.replace(config.learner, packing=packing))
        self.arch, self.keeper = arch, keeper
        batch, totals = make_batch(rollout, _advantage(rollout), config.rollout.temperature,
                                   layout_of(config), keep_all=True)
        self.useful, self.padded_tokens = roofline.useful_work(batch), _run_tokens(batch, totals)
        rows, whole = NamedSharding(mesh, P(None, sharding.ROWS)), sharding.replicated(mesh)
        self.args = (sharding.put(rows, batch), sharding.put(whole, totals), None, None,
                     trainer.base, None)
        places = jax.tree.map(lambda a: a.sharding, keeper.state)
        self.program = jax.jit(
            functools.partial(learner.update, arch, config),
            donate_argnums=(0,), out_shardings=(places, whole),
        ).lower(keeper.state, *self.args).compile()

    def run(self) -> float:
        """Applies the update once; returns its seconds."""
        began = time.perf_counter()
        self.keeper.state, metrics = self.program(self.keeper.state, *self.args)
        jax.block_until_ready((self.keeper.state, metrics))
        seconds = time.perf_counter() - began
        if not float(metrics["applied"]):
            raise RuntimeError("the update was not finite, so its time says nothing")
        return seconds

    def describe(self, seconds: list[float], machine: Hardware) -> dict[str, Any]:
        """Returns the speed of an update against the FLOPs of its useful work."""
        bound = self.useful.flops(self.arch) / machine.peak
        return {
            "seconds": spread(seconds),
            "useful_tokens_per_second": spread([self.useful.tokens / s for s in seconds]),
            "response_tokens_per_second": spread([self.useful.scored / s for s in seconds]),
            "bound_seconds": bound, "over_bound": spread([s / bound for s in seconds]),
            "padded_tokens": self.padded_tokens, "useful": dataclasses.asdict(self.useful),
            "useful_flops": self.useful.flops(self.arch),
            "temporary_bytes": self.program.memory_analysis().temp_size_in_bytes}


def _run_tokens(batch: Batch, totals: Totals) -> int:
    """Returns the columns of the micro-batches that an update runs, padding included."""
    return int(totals.micro_batches) * int(np.prod(batch.tokens.shape[1:]))


def _advantage(rollout: Rollout) -> np.ndarray:
    """Returns advantages that give every sequence a gradient, so that none is left out."""
    return np.where(np.arange(len(rollout.length)) % 2, 1.0, -1.0).astype(np.float32)
