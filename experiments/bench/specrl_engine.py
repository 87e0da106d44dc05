"""The engine of this project as a contender, and timed runs of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config
from specrl_jax.model.weights import Source
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.layout import make_request
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.runtime.compilation import CompilationCounter

from .hardware import Hardware

TIMED, WARM_UP, EARLIER = 0, 1, 2  # steps of the noise keys; from EARLIER on, earlier responses


@dataclasses.dataclass(frozen=True)
class Timed:
    """One timed generation of all prompts, prefill included."""

    seconds: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Run(Timed):
    """A generation by `SpecrlEngine`, with the engine's own account."""

    result: Result
    compilations: int
    hardware: Hardware | None = None  # measured right before and after

    @property
    def launch_seconds(self) -> float:
        return sum(launch.seconds for launch in self.result.trace)

    @property
    def rounds(self) -> int:
        return self.result.counters["rounds"]

    @property
    def round_seconds(self) -> float:
        """Seconds of a round in the compiled loops, without prefill and host."""
        return self.launch_seconds / self.rounds

    @property
    def host_seconds(self) -> float:
        """Seconds of the host per round."""
        rest = self.seconds - self.result.prefill_seconds - self.launch_seconds
        return rest / self.rounds


class SpecrlEngine:
    """Generates responses to the same prompts again and again.

    Args:
      config: complete, with shapes that hold the prompts.
      params: float32, in the layout of Actor.params.
      prompts: token ids, one sequence each; those beyond rollout.batch_size wait for a slot.
      stop: tokens that end a row.
      limits: i32[prompts] tokens of each response; None is rollout.max_new_tokens.
    """

    def __init__(self, config: Config, source: Source, params: Any,
                 prompts: Sequence[Sequence[int]], counter: CompilationCounter,
                 stop: Sequence[int] = (), limits: np.ndarray | None = None) -> None:
        self.config, self.prompts, self.counter, self.limits = config, prompts, counter, limits
        self.sampler = Sampler(config, source.arch, stop, sharding.make_mesh(config.mesh),
                               prompts=len(prompts), group=1, tokenizer=source.tokenizer)
        self.sampler.publish(params, 0)
        self.past: np.ndarray | None = None  # i32[prompts, K, T], where the drafter reads it

    @property
    def remembers(self) -> bool:
        """Whether the drafter reads earlier responses."""
        return bool(self.sampler.engine.layout.past)

    def generate(self, step: int) -> Run:
        """Returns a timed generation with the noise of `step`."""
        index = np.arange(len(self.prompts))
        keys = prng.row_keys(self.config.seed, "generate", step, index, index * 0, index * 0)
        batch = make_request(self.prompts, keys, 1, self.config.rollout, self.past)
        if self.limits is not None:
            batch.limit = self.limits
        self.counter.take()
        result = self.sampler.engine.run(
            self.sampler.params, batch, self.sampler.drafter_params,
            rounds=self.config.rollout.rounds_per_launch)
        return Run(result.seconds, int(result.sequences.length.sum()), result, self.counter.take())


def responses(run: Run) -> np.ndarray:
    """Returns the responses of a run, i32[prompts, T], padded with -1."""
    found = run.result.sequences
    within = np.arange(found.tokens.shape[1])[None] < found.length[:, None]
    return np.where(within, found.tokens, -1).astype(np.int32)
