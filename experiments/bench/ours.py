"""Our engine as a contender: one drafter, one batch size, one workload."""

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

from . import work
from .hardware import Hardware
from .workload import Workload

WARM_UP, TIMED = 0, 1  # steps of the noise keys
PAST = 1  # earlier responses of a prompt that history drafts from: those of the warm-up


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
    """What our engine says about itself besides."""

    result: Result
    compilations: int
    hardware: Hardware | None = None  # what the machine could do around this run

    @property
    def launch_seconds(self) -> float:
        return sum(launch.seconds for launch in self.result.trace)

    @property
    def rounds(self) -> int:
        return self.result.counters["rounds"]

    @property
    def round_seconds(self) -> float:
        """Of the compiled loops alone: without prefill, and without the host between launches."""
        return self.launch_seconds / self.rounds

    @property
    def host_seconds(self) -> float:
        """The host's share of a round."""
        rest = self.seconds - self.result.prefill_seconds - self.launch_seconds
        return rest / self.rounds


class Ours:
    """`run` generates the workload once; the same tokens each time.

    Args:
      config: its spec, control and rollout sections hold what the workload does not fix.
      params: float32, as Actor.params lays them out.
      drafter: off or history.
    """

    def __init__(self, config: Config, arch: Architecture, params: Any, workload: Workload,
                 drafter: str, counter: CompilationCounter) -> None:
        self.config = tailored(config, workload, drafter)
        self.workload, self.counter = workload, counter
        mesh = sharding.make_mesh(self.config.mesh)
        self.sampler = Sampler(self.config, arch, (), mesh, prompts=workload.rows, group=1)
        self.sampler.publish(params, 0)
        self.past: np.ndarray | None = None

    def warm_up(self) -> None:
        """Compiles, and generates once, as peers do; history drafts from what was said then."""
        self.sampler.compile()
        said = self._generate(WARM_UP).sequences
        if self.sampler.engine.layout.past:
            within = np.arange(said.tokens.shape[1])[None] < said.length[:, None]
            self.past = np.where(within, said.tokens, -1).astype(np.int32)[:, None]

    def run(self) -> TimedRollout:
        self.counter.take()
        result = self._generate(TIMED)
        made = int(result.sequences.length.sum())
        if made != self.workload.tokens:
            raise RuntimeError(f"{made} tokens were made, {self.workload.tokens} were wanted")
        return TimedRollout(result.seconds, made, result, self.counter.take())

    def bound(self, result: Result, hardware: Hardware) -> work.Bound:
        """The least seconds of all rounds of a rollout."""
        rows, context = work.context_by_round(
            self.workload.prompt_lengths, result.sequences.commits, result.sequences.rounds)
        counters = result.counters
        nodes = 1 + counters["drafted"] / counters["row_rounds"]
        itemsize = np.dtype(self.config.model.dtype).itemsize
        return work.rounds_bound(self.sampler.engine.decoder.arch, hardware, rows, context, nodes,
                                 itemsize)

    def _generate(self, step: int) -> Result:
        return self.sampler.engine.run(self.sampler.params, self._request(step),
                                       self.sampler.drafter_params,
                                       rounds=self.config.rollout.rounds_per_launch)

    def _request(self, step: int) -> RolloutRequest:
        rows = np.arange(self.workload.rows)
        keys = prng.row_keys(self.config.seed, "generate", step, rows, rows * 0, rows * 0)
        wanted = request(self.workload.prompts, keys, 1, self.config.rollout, self.past)
        wanted.limit = self.workload.limits
        return wanted


def tailored(config: Config, workload: Workload, drafter: str) -> Config:
    """`config` with the shapes of a workload, temperature 1 and no truncation."""
    rows = workload.rows
    smallest = {"heavy": 1, "uniform": rows if drafter == "off" else max(1, rows // 2)}
    rollout = dataclasses.replace(
        config.rollout, batch_size=rows, min_batch=smallest[workload.name],
        max_prompt_tokens=max(2, int(workload.prompt_lengths.max())),
        max_new_tokens=workload.longest, temperature=1.0, top_k=0, top_p=1.0)
    spec = dataclasses.replace(config.spec, drafter=drafter, history_past=PAST)
    return dataclasses.replace(config, rollout=rollout, spec=spec)
