"""Layouts of a run on some devices: those that fit, ranked, and why the others were refused."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from specrl_jax.config import Config, ConfigError, override
from specrl_jax.model.architecture import Architecture
from specrl_jax.runtime.hardware import GIB

from . import predict, work
from .predict import Machine, Step
from .traces import Trace
from .work import Model

ROWS, MICRO_BATCHES = (4, 8, 16, 32, 64, 128), (1, 2, 4, 8)
REMATS = ("none", "dots_with_no_batch_dims_saveable", "full")
ROLLOUT = ("mesh.data", "mesh.fsdp", "mesh.tensor", "rollout.batch_size", "spec.drafter")
TIE = 0.01  # layouts whose seconds differ by less are ranked by their memory


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout that fits, and its prediction."""

    values: dict[str, Any]  # at dotted paths of the config
    memory: dict[str, float]  # bytes of a device
    step: Step

    @property
    def drafts(self) -> bool:
        return self.values["spec.drafter"] != "off"

    @property
    def gib(self) -> float:
        return sum(self.memory.values()) / GIB


@dataclasses.dataclass(frozen=True)
class Plan:
    """All candidates: those that fit, fastest first, and the number refused by reason."""

    ranked: list[Candidate]
    refused: dict[str, int]

    @property
    def best(self) -> list[Candidate]:
        """The fastest of each mesh, rows and drafter."""
        kinds: dict[Any, Candidate] = {}
        for candidate in self.ranked:
            kinds.setdefault(tuple(candidate.values[name] for name in ROLLOUT), candidate)
        return list(kinds.values())


def plan(config: Config, arch: Architecture, machine: Machine, trace: Trace, *,
         plain: bool = True) -> Plan:
    """Returns the layouts of a run on a machine; with `plain` also those without its drafter.

    Raises:
      ConfigError: none fits; says which need was the least above what is there.
    """
    ranked, refused, nearest = [], collections.Counter(), (float("inf"), "")
    simulated: dict[Any, Any] = {}
    allowed = machine.chip.limit
    for values in layouts(config, arch, machine.devices, plain):
        try:
            model = Model(override(config, values), arch)
        except ConfigError as error:
            refused[str(error).partition(" = ")[0] + ": does not divide"] += 1
            continue
        needs = work.memory(model)
        if sum(needs.values()) > allowed:
            largest = max(needs, key=lambda name: needs[name])
            refused[f"memory: most of it {largest}"] += 1
            missing = (sum(needs.values()) - allowed) / GIB
            nearest = min(nearest, (missing, f"{largest} of {shown(values)}"))
            continue

        def once(model: Model, machine: Machine, trace: Trace) -> predict.Rollout:
            """Remat and micro-batch do not change a rollout."""
            key = (model.shards, model.tensor, model.shapes.batch, model.drafts)
            if key not in simulated:
                simulated[key] = predict.simulate(model, machine, trace)
            return simulated[key]

        ranked.append(Candidate(values, needs, predict.step(model, machine, trace, once)))
    if not ranked:
        raise ConfigError(
            f"target = {machine.devices} x {machine.chip.name}: no layout fits; the nearest misses "
            f"{nearest[0]:.1f} GiB a device, most of it {nearest[1]}: take more devices, a smaller "
            "model or shorter responses" if nearest[1] else
            f"target = {machine.devices} x {machine.chip.name}: no layout divides the step's "
            f"{config.prompts_per_step} prompts: change prompts_per_step")
    return Plan(sorted(ranked, key=lambda c: (round(math.log(c.step.seconds) / TIE), c.gib)),
                dict(refused))


def layouts(config: Config, arch: Architecture, devices: int, plain: bool
            ) -> Iterator[dict[str, Any]]:
    """Yields values at dotted paths: meshes of all devices, rows, micro-batches, remat, drafter."""
    meshes = [(devices // fsdp // tensor, fsdp, tensor) for fsdp in _divisors(devices)
              for tensor in _divisors(arch.num_kv_heads) if devices % (fsdp * tensor) == 0]
    drafters = sorted({config.spec.drafter, *(["off"] if plain else [])})
    for (data, fsdp, tensor), rows, micro, remat, drafter in itertools.product(
            meshes, ROWS, MICRO_BATCHES, REMATS, drafters):
        shards = data * fsdp
        if shards * max(rows, micro) <= config.sequences:
            yield {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor,
                   "rollout.batch_size": rows * shards, "spec.drafter": drafter,
                   "learner.micro_batch": micro * shards * config.sequences_per_row,
                   "learner.remat": remat, "spec.budget": 0, **_distill(config, shards, drafter)}


def _distill(config: Config, shards: int, drafter: str) -> dict[str, Any]:
    if drafter == "off":
        return {"distill.when": "off", "distill.overlap": False}
    batch = -(-config.distill.batch // shards) * shards
    sequences = config.distill.sequences and max(config.distill.sequences, batch)
    return {"distill.micro_batch": shards, "distill.batch": batch, "distill.sequences": sequences}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def shown(values: dict[str, Any]) -> str:
    """Returns a layout in a few words."""
    mesh = "x".join(str(values[f"mesh.{axis}"]) for axis in ("data", "fsdp", "tensor"))
    return (f"mesh {mesh}, {values['rollout.batch_size']} rows, micro-batch "
            f"{values['learner.micro_batch']}, remat {values['learner.remat']}, drafter "
            f"{values['spec.drafter']}")
