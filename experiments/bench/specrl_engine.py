"""The engine of this project as a contender: one drafter, one batch size, one workload."""

import dataclasses
from typing import Any

import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.model.architecture import Architecture
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.layout import RolloutRequest, request
from specrl_jax.rollout.sampler import Sampler

from . import roofline
from .hardware import Hardware
from .workload import Workload

WARM_UP, TIMED = 0, 1  # steps of the noise keys
PAST = 1  # earlier responses per prompt that history drafts from: those of the warm-up


@dataclasses.dataclass(frozen=True)
class Timed:
    """One timed generation of a whole workload, prefill included."""

    seconds: float
    tokens: int  # wanted tokens

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class TimedRollout(Timed):
    """A generation by `SpecrlEngine`, with the engine's own account."""

    result: Result
    compilations: int
    hardware: Hardware | None = None  # measured right before and after

    @property
    def launch_seconds(self) -> float:
        return sum(launch["seconds"] for launch in self.result.trace)

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
    """Generates the workload once per `run`, with the same tokens each time.

    Args:
      config: its spec, control and rollout sections set what the workload leaves open.
      params: float32, in the layout of Actor.params.
      drafter: off or history.
    """

    def __init__(self, config: Config, arch: Architecture, params: Any, workload: Workload,
                 drafter: str, counter: CompilationCounter) -> None:
        self.config = config_for(config, workload, drafter)
        self.workload, self.counter = workload, counter
        mesh = sharding.make_mesh(self.config.mesh)
        self.sampler = Sampler(self.config, arch, (), mesh, prompts=workload.rows, group=1)
        self.sampler.publish(params, 0)
        self.past: np.ndarray | None = None

    def warm_up(self) -> None:
        """Compiles and generates once; history drafts from these responses later."""
        self.sampler.compile()
        first = self._generate(WARM_UP).sequences
        if self.sampler.engine.layout.past:
            within = np.arange(first.tokens.shape[1])[None] < first.length[:, None]
            self.past = np.where(within, first.tokens, -1).astype(np.int32)[:, None]

    def run(self) -> TimedRollout:
        """Generates the workload and times it."""
        self.counter.take()
        result = self._generate(TIMED)
        made = int(result.sequences.length.sum())
        if made != self.workload.tokens:
            raise RuntimeError(f"{made} tokens were made, {self.workload.tokens} were wanted")
        return TimedRollout(result.seconds, made, result, self.counter.take())

    def bound(self, result: Result, hardware: Hardware) -> roofline.Bound:
        """Returns the least seconds that a rollout's rounds can take on `hardware`."""
        rows, context = roofline.context_by_round(
            self.workload.prompt_lengths, result.sequences.commits, result.sequences.rounds)
        counters = result.counters
        nodes = 1 + counters["drafted"] / counters["row_rounds"]
        itemsize = np.dtype(self.config.model.dtype).itemsize
        return roofline.rounds_bound(self.sampler.engine.decoder.arch, hardware, rows, context,
                                     nodes, itemsize)

    def _generate(self, step: int) -> Result:
        return self.sampler.engine.run(self.sampler.params, self._request(step),
                                       self.sampler.drafter_params,
                                       rounds=self.config.rollout.rounds_per_launch)

    def _request(self, step: int) -> RolloutRequest:
        rows = np.arange(self.workload.rows)
        keys = prng.row_keys(self.config.seed, "generate", step, rows, rows * 0, rows * 0)
        batch = request(self.workload.prompts, keys, 1, self.config.rollout, self.past)
        batch.limit = self.workload.limits
        return batch


def config_for(config: Config, workload: Workload, drafter: str) -> Config:
    """Returns `config` with the shapes of a workload, temperature 1 and no truncation."""
    rows = workload.rows
    smallest = {"heavy": 1, "uniform": rows if drafter == "off" else max(1, rows // 2)}
    rollout = dataclasses.replace(
        config.rollout, batch_size=rows, min_batch=smallest[workload.name],
        max_prompt_tokens=max(2, int(workload.prompt_lengths.max())),
        max_new_tokens=workload.longest, temperature=1.0, top_k=0, top_p=1.0)
    spec = dataclasses.replace(config.spec, drafter=drafter, history_past=PAST)
    return dataclasses.replace(config, rollout=rollout, spec=spec)
