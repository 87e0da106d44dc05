"""One policy update as a contender: one packing, on the sequences of a real rollout."""

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.model.architecture import Architecture
from specrl_jax.rl import learner
from specrl_jax.rl.learner import LearnerState
from specrl_jax.structs import Rollout

from . import work
from .hardware import Hardware
from .timing import spread


class Keeper:
    """The one learner state that all updates read, donate and replace."""

    def __init__(self, state: LearnerState) -> None:
        self.state = state


class Update:
    """A compiled update; `run` applies it once and returns its seconds."""

    def __init__(self, config: Config, arch: Architecture, mesh: Mesh, rollout: Rollout,
                 keeper: Keeper, packing: str) -> None:
        config = dataclasses.replace(
            config, learner=dataclasses.replace(config.learner, packing=packing))
        self.arch, self.keeper = arch, keeper
        batch, totals = learner.make_batch(
            rollout, _advantage(rollout), config.rollout.temperature,
            rows=config.learner.micro_batch // config.sequences_per_row,
            sequences_per_row=config.sequences_per_row,
            keep_all=True)
        self.useful = work.useful_work(batch)
        self.padded = work.padded_work(batch, int(totals.micro_batches))
        rows, whole = NamedSharding(mesh, P(None, sharding.ROWS)), sharding.replicated(mesh)
        self.args = (sharding.put(rows, batch), sharding.put(whole, totals), None, None)
        places = jax.tree.map(lambda a: a.sharding, keeper.state)
        self.program = jax.jit(
            functools.partial(learner.update, arch, config),
            donate_argnums=(0,), out_shardings=(places, whole),
        ).lower(keeper.state, *self.args).compile()

    def run(self) -> float:
        began = time.perf_counter()
        self.keeper.state, metrics = self.program(self.keeper.state, *self.args)
        jax.block_until_ready((self.keeper.state, metrics))
        seconds = time.perf_counter() - began
        if not float(metrics["applied"]):
            raise RuntimeError("the update was not finite, so its time says nothing")
        return seconds

    def describe(self, seconds: list[float], decoder: Hardware) -> dict[str, Any]:
        """Speed of an update against the FLOPs of its useful and of its padded work."""
        bound, padded = (part.flops(self.arch) / decoder.peak
                         for part in (self.useful, self.padded))
        return {
            "seconds": spread(seconds),
            "useful_tokens_per_second": spread([self.useful.tokens / s for s in seconds]),
            "response_tokens_per_second": spread([self.useful.scored / s for s in seconds]),
            "bound_seconds": bound, "over_bound": spread([s / bound for s in seconds]),
            "padded_bound_seconds": padded,
            "over_padded_bound": spread([s / padded for s in seconds]),
            "useful": dataclasses.asdict(self.useful), "padded": dataclasses.asdict(self.padded),
            "useful_flops": self.useful.flops(self.arch),
            "padded_flops": self.padded.flops(self.arch),
            "temporary_bytes": self.program.memory_analysis().temp_size_in_bytes}


def _advantage(rollout: Rollout) -> np.ndarray:
    """Every sequence has a gradient, so no row is left out."""
    return np.where(np.arange(len(rollout.length)) % 2, 1.0, -1.0).astype(np.float32)
