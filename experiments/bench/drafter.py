"""What one update of an EAGLE-3 head computes, and how long it takes."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from specrl_jax.config import Config
from specrl_jax.distill.data import Corpus
from specrl_jax.distill.offline import DrafterTrainer, DrafterTraining
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model.transformer import Params
from specrl_jax.model.weights import Source

from .hardware import Probes, as_json
from .timing import alternate, seconds_of, spread
from .work import BACKWARD, attention_flops, head_params, layer_matmul_params

LAYER = ("qkv", "o", "gate_up", "down")


@dataclasses.dataclass(frozen=True)
class DrafterWork:
    """What the sequences of a batch need at least."""

    tokens: int
    pairs: int  # (query, key)
    scored: int  # response tokens, whose distributions are the targets
    drafted: tuple[int, ...]  # drafts of each depth
    drafted_pairs: int  # (draft, key), of all depths

    def features(self, arch: EagleArch) -> int:
        """FLOPs of the actor's forward and of its logits of response tokens."""
        actor = arch.actor
        products = layer_matmul_params(actor) * self.tokens + head_params(actor) * self.scored
        return 2 * products + int(attention_flops(actor, self.pairs))

    def update(self, arch: EagleArch) -> int:
        """FLOPs of targets, and of drafts forward and backward."""
        sizes = {name: math.prod(p.shape) for name, p in eagle_model.describe(arch).items()}
        head = arch.draft_vocab * arch.actor.hidden_size
        keys = sizes["qkv"] * 2 // (arch.layer.group + 2)  # of all tokens, once
        layers = self.tokens * (sizes["fc"] + keys) - self.drafted[0] * keys + sum(
            self.drafted) * sum(sizes[name] for name in LAYER)
        attention = int(attention_flops(arch.layer, self.drafted_pairs))
        drafts = 2 * head * sum(self.drafted)
        gradients = BACKWARD if arch.own_head else BACKWARD - 1  # a lent head learns nothing
        return (2 * head * self.scored + BACKWARD * (2 * layers + attention)
                + gradients * drafts)


def measure(config: Config, source: Source, params: Params, options: DrafterTraining, prompt: int,
            response: int, repeats: int, probes: Probes) -> dict[str, Any]:
    """Seconds of a batch's features and of an update on them, and both over their bounds."""
    count = max(options.batch_tokens // (prompt + response), 1)
    corpus = random_corpus(source.arch.vocab_size, count, prompt, response)
    trainer = DrafterTrainer(config, options, source, params, corpus, corpus)
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
            "hardware": as_json(machine), "work": dataclasses.asdict(work),
            "cases": {name: {
                "seconds": spread(seconds[name]), "flops": flops[name],
                "tokens_per_second": spread([work.scored / s for s in seconds[name]]),
                "over_bound": spread([s * machine.peak / flops[name] for s in seconds[name]])}
                for name in tasks}}


def work_of(count: int, prompt: int, response: int, steps: int) -> DrafterWork:
    """Of equal sequences; a draft of depth j needs j response tokens before the one it predicts."""
    length = prompt + response
    return DrafterWork(
        count * length, count * length * (length + 1) // 2, count * response,
        tuple(count * max(response - j, 0) for j in range(steps)),
        count * sum(prompt - 1 + i for j in range(steps) for i in range(j, response)))


def random_corpus(vocab: int, count: int, prompt: int, response: int) -> Corpus:
    tokens = np.random.default_rng(0).integers(0, vocab, (count, prompt + response), np.int32)
    return Corpus(list(tokens), np.full(count, prompt, np.int32), np.zeros(count, np.float32),
                  np.zeros(count, np.float32), np.zeros((count, 2), np.uint32))
