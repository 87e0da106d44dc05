"""Times drafter training against its FLOP bound: features of a batch, and one update.

    python experiments/bench.py drafter
    python experiments/bench.py drafter --prompt_tokens=96 --new_tokens=192 --batch_tokens=512

Writes results/bench_drafter.json. Sequences are random tokens, since only lengths count; an update
is that of train_drafter.py with its defaults. The bound leaves out padding and recomputation.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from absl import flags

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.distill.data import Corpus, PublishedActor
from specrl_jax.distill.offline import DrafterTrainer, DrafterTraining
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model.source import Actor
from specrl_jax.model.transformer import Params
from specrl_jax.model.weights import Source

from . import results, tables
from .hardware import Probes
from .roofline import BACKWARD, MATRICES, attention_flops, forward_flops
from .timing import alternate, seconds_of, spread

NEEDS_MODEL = True
FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `bench.py drafter`."""
    results.define_flags(repeats=5)
    for name, value, text in (
            ("prompt_tokens", 96, "prompt tokens of each sequence"),
            ("new_tokens", 192, "response tokens of each sequence"),
            ("batch_tokens", 512, "tokens of an update"),
            ("micro_batch_tokens", 512, "tokens of one pass")):
        flags.DEFINE_integer(name, value, text, lower_bound=1)


def main(config: Config, actor: Actor) -> int:
    """Runs the benchmark; returns the exit status."""
    out = results.destination(FLAGS.out, "bench_drafter.json")
    options = DrafterTraining(batch_tokens=FLAGS.batch_tokens, feature_megabytes=0,
                              micro_batch_tokens=FLAGS.micro_batch_tokens)
    params = actor.params(sharding.make_mesh(config.mesh))
    found = measure(config, actor.source, params, options, FLAGS.prompt_tokens, FLAGS.new_tokens,
                    FLAGS.repeats, Probes())
    results.write(out, results.blank(config) | found)
    for name, one in found["cases"].items():
        print(f"{name}: {tables.between(one['seconds'], digits=2)} s, "
              f"{tables.between(one['tokens_per_second'], digits=0)} response tokens/s, "
              f"{tables.between(one['over_bound'], digits=2)} of the bound")
    print(f"wrote {out}")
    return 0


@dataclasses.dataclass(frozen=True)
class DrafterWork:
    """The work that the sequences of a batch need."""

    tokens: int
    pairs: int  # (query, key)
    scored: int  # response tokens, whose distributions are the targets
    drafted: tuple[int, ...]  # drafts of each depth
    drafted_pairs: int  # (draft, key), of all depths

    def features(self, arch: EagleArch) -> int:
        """Returns the FLOPs of the actor's forward and its logits of response tokens."""
        return int(forward_flops(arch.actor, self.tokens, self.scored, self.pairs))

    def update(self, arch: EagleArch) -> int:
        """Returns the FLOPs of targets, and of drafts forward and backward."""
        sizes = {name: math.prod(p.shape) for name, p in eagle_model.describe(arch).items()}
        head = arch.draft_vocab * arch.actor.hidden_size
        keys = sizes["qkv"] * 2 // (arch.layer.group + 2)  # of all tokens, once
        layers = self.tokens * (sizes["fc"] + keys) - self.drafted[0] * keys + sum(
            self.drafted) * sum(sizes[name] for name in MATRICES)
        attention = int(attention_flops(arch.layer, self.drafted_pairs))
        drafts = 2 * head * sum(self.drafted)
        gradients = BACKWARD if arch.own_head else BACKWARD - 1  # a shared head is frozen
        return (2 * head * self.scored + BACKWARD * (2 * layers + attention)
                + gradients * drafts)


def measure(config: Config, source: Source, params: Params, options: DrafterTraining, prompt: int,
            response: int, repeats: int, probes: Probes) -> dict[str, Any]:
    """Returns the seconds of a batch's features and of an update, and both over their bounds."""
    count = max(options.batch_tokens // (prompt + response), 1)
    corpus = random_corpus(source.arch.vocab_size, count, prompt, response)
    trainer = DrafterTrainer(config, options, PublishedActor(source, params), corpus, corpus)
    ran = int((trainer.plans[0].rows >= 0).sum())  # whole micro-batches of them
    work = work_of(ran, prompt, response, options.unroll)
    before, batch = probes.measure(), trainer.batch(0)

    def update() -> Any:
        return trainer.programs.update(trainer.state, trainer.frozen, *batch)

    tasks = {"features": lambda: trainer.batch(0), "update": update}
    timed = {name: (lambda task=task: seconds_of(task, jax.block_until_ready))
             for name, task in tasks.items()}
    alternate(timed, 1)  # compiles
    seconds = alternate(timed, repeats)
    machine = before.best(probes.measure())
    flops = {"features": work.features(trainer.arch), "update": work.update(trainer.arch)}
    return {"sequences": ran, "options": dataclasses.asdict(options),
            "hardware": dataclasses.asdict(machine), "work": dataclasses.asdict(work),
            "cases": {name: {
                "seconds": spread(seconds[name]), "flops": flops[name],
                "tokens_per_second": spread([work.scored / s for s in seconds[name]]),
                "over_bound": spread([s * machine.peak / flops[name] for s in seconds[name]])}
                for name in tasks}}


def work_of(count: int, prompt: int, response: int, steps: int) -> DrafterWork:
    """Returns the work of equal sequences; a draft of depth j needs j response tokens before it."""
    length = prompt + response
    return DrafterWork(
        count * length, count * length * (length + 1) // 2, count * response,
        tuple(count * max(response - j, 0) for j in range(steps)),
        count * sum(prompt - 1 + i for j in range(steps) for i in range(j, response)))


def random_corpus(vocab: int, count: int, prompt: int, response: int) -> Corpus:
    """Returns sequences of random tokens."""
    tokens = np.random.default_rng(0).integers(0, vocab, (count, prompt + response), np.int32)
    return Corpus(list(tokens), np.full(count, prompt, np.int32), np.zeros(count, np.float32),
                  np.zeros(count, np.float32), np.zeros((count, 2), np.uint32))
