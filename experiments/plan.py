"""Plans a run on a pod: which mesh, rows, micro-batch and remat make its RL steps short.

    python experiments/plan.py --config=qwen2_5_7b --target=v6e:4x4 --nocompile

Layouts that do not fit a device's memory are refused by arithmetic. The others are ranked by the
least seconds of a step: FLOPs, bytes and links over their peaks. The first
three are compiled where the target's compiler is installed: the update, and rounds of two numbers
of rows. For TPUs their seconds are by the compiler's clock then. --nocompile leaves that out,
--noplain leaves out layouts without the drafter. Lengths of responses and the acceptance of drafts
are those of a run, --trace=RUN. Nothing is measured, and links under load and the host are unknown.
Exit status 1 if a layout that is compiled fails or does not fit.
"""

import collections
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import config_flags
from absl import flags
from bench import json_file
from compile import compiling, findings, seconds, targets, traces, work
from compile.seconds import Cost, Step
from compile.targets import Target
from compile.traces import Trace
from compile.work import Model
from rich.console import Console
from rich.table import Table

from specrl_jax.config import Config, ConfigError, check, override
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.published import without_weights
from specrl_jax.model.weights import describe_source
from specrl_jax.runtime.hardware import GIB
from specrl_jax.runtime.paths import output_file

TARGET = flags.DEFINE_string("target", None, "devices, such as v6e:4x4, v5p:4x4x4 or h100:8")
TRACE = flags.DEFINE_string("trace", "", "a run's directory, for lengths and acceptance "
                            "(default: the repository's own)")
COMPILE = flags.DEFINE_bool("compile", True, "compile rounds and update of the first three")
PLAIN = flags.DEFINE_bool("plain", True, "consider layouts without the drafter, too")
OUT = flags.DEFINE_string("out", None, "write the plan to this JSON file, too")
SHOWN, COMPILED = 8, 3
TIE = 0.01  # layouts whose seconds differ by less are ranked by their memory
ROWS, MICRO_BATCHES = (4, 8, 16, 32, 64, 128), (1, 2, 4, 8)
REMATS = ("none", "dots_with_no_batch_dims_saveable", "full")
ROUNDS = ("plain round", "drafted round")


class Candidate(NamedTuple):
    """A layout that fits."""

    values: dict[str, Any]  # at dotted paths of the config
    memory: dict[str, float]  # bytes of a device, by what needs them
    step: Step


def main(config: Config, workdir: Path) -> int:
    del workdir
    target, trace = targets.parse(TARGET.value or ""), traces.read(TRACE.value)
    out = OUT.value and output_file("--out", OUT.value)
    check(PLAIN.value or config.spec.drafter != "off", "spec.drafter", "off",
          "--noplain leaves no layout; name a drafter or drop it")
    if COMPILE.value:
        targets.check_packages(target)
    config = without_weights(config)
    arch = describe_source(config.model.path, family=config.model.family).arch
    best, refused = fitting(config, arch, target, trace, PLAIN.value)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
    console.print(table("least seconds, by arithmetic", best[:SHOWN]))
    for reason, count in refused.most_common():
        console.print(f"refused {count} layouts: {reason}")
    compiled, failures = [], []
    for candidate in best[:COMPILED] if COMPILE.value else ():
        try:
            compiled.append(by_clock(config, arch, target, trace, candidate))
        except ConfigError as error:
            failures.append(str(error))
            console.print(f"{flags_of(candidate.values)}: {error}")
    if compiled and target.platform == "tpu":
        compiled.sort(key=lambda c: c.step.seconds)
        console.print(table("seconds by the compiler's clock", compiled))
    for first in (compiled or best[len(failures):])[:1]:
        needs = ", ".join(f"{name} {size / GIB:.1f}" for name, size in first.memory.items())
        console.print(f"GiB a device: {needs}, of {target.chip.available / GIB:.1f}")
        console.print(flags_of(first.values))
    if out:
        made = {name: [c._asdict() | {"step": c.step.parts, "plain": c.step.plain} for c in each]
                for name, each in {"least": best[:SHOWN], "clock": compiled}.items()}
        json_file.write(out, {"trace": trace.name, "refused": refused, "failures": failures} | made)
    return 1 if failures else 0


def fitting(config: Config, arch: Architecture, target: Target, trace: Trace, plain: bool
            ) -> tuple[list[Candidate], collections.Counter[str]]:
    """Returns the layouts that fit, those of the least seconds first, one of each mesh, rows and
    drafter; and the number of those that do not by reason. `plain`: also without the drafter.

    Raises:
      ConfigError: none fits; says which need was the least above what is there.
    """
    chip = target.chip
    fits, refused, nearest = [], collections.Counter(), (float("inf"), "")
    rollouts: dict[Any, Step] = {}  # remat and micro-batch do not change them
    for values in layouts(config, arch, target.size, plain):
        try:
            model = Model(override(config, values), arch)
        except ConfigError as error:
            refused[str(error).partition(" = ")[0] + ": not possible"] += 1
            continue
        needs = work.memory(model)
        if (missing := (sum(needs.values()) - chip.limit) / GIB) > 0:
            largest = max(needs, key=lambda name: needs[name])
            refused[f"memory: most of it {largest}"] += 1
            nearest = min(nearest, (missing, f"{largest} of {flags_of(values)}"))
            continue
        kind = kind_of(values)
        if kind not in rollouts:
            rollouts[kind] = seconds.step(model, seconds.least_round(model, chip), {}, trace)
        parts = rollouts[kind].parts | seconds.least_rest(model, chip, trace)
        fits.append(Candidate(values, needs, Step(parts, rollouts[kind].plain)))
    if not fits:
        raise ConfigError(f"target = {target.name}: " + (
            f"no layout fits; the nearest misses {nearest[0]:.1f} GiB a device, most of it "
            f"{nearest[1]}: take more devices, a smaller model or shorter responses" if nearest[1]
            else f"no layout divides the step's {config.prompts_per_step} prompts: change "
            "prompts_per_step"))
    first: dict[Any, Candidate] = {}
    for candidate in sorted(fits, key=lambda c: (
            round(math.log(c.step.seconds) / TIE), sum(c.memory.values()))):
        first.setdefault(kind_of(candidate.values), candidate)
    return list(first.values()), refused


def flags_of(values: dict[str, Any]) -> str:
    """Returns a layout as flags."""
    return " ".join(f"--config.{name}={value}" for name, value in values.items())


def kind_of(values: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what a rollout depends on of a layout."""
    return tuple(values[name] for name in (
        "mesh.data", "mesh.fsdp", "mesh.tensor", "rollout.batch_size", "spec.drafter"))


def layouts(config: Config, arch: Architecture, devices: int, plain: bool
            ) -> Iterator[dict[str, Any]]:
    """Yields values at dotted paths: meshes of all devices, rows, micro-batches, remat, drafter."""
    def divisors(number: int) -> list[int]:
        return [n for n in range(1, number + 1) if number % n == 0]

    meshes = [(devices // fsdp // tensor, fsdp, tensor) for fsdp in divisors(devices)
              for tensor in divisors(arch.num_kv_heads) if devices % (fsdp * tensor) == 0]
    drafters = sorted({config.spec.drafter, *(["off"] if plain else [])})
    for (data, fsdp, tensor), rows, micro, remat, drafter in itertools.product(
            meshes, ROWS, MICRO_BATCHES, REMATS, drafters):
        shards = data * fsdp
        if shards * max(rows, micro) > config.sequences:
            continue
        batch = -(-config.distill.batch // shards) * shards
        distill = {"distill.when": "off", "distill.overlap": False} if drafter == "off" else {
            "distill.micro_batch": shards, "distill.batch": batch,
            "distill.sequences": config.distill.sequences and max(config.distill.sequences, batch)}
        yield {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor,
               "rollout.batch_size": rows * shards, "spec.drafter": drafter,
               "learner.micro_batch": micro * shards * config.sequences_per_row,
               "learner.remat": remat, "spec.budget": 0, **distill}


def by_clock(config: Config, arch: Architecture, target: Target, trace: Trace,
             candidate: Candidate) -> Candidate:
    """Compiles a layout's update and rounds; returns it with seconds by the clock, if there is one.

    Raises:
      ConfigError: a program does not compile or fit.
    """
    model = Model(override(config, candidate.values), arch)
    costs: dict[str, list[Cost]] = {name: [] for name in ROUNDS}
    update, sizes = None, model.shapes.batches
    drafting = [rows for rows in sizes if seconds.nodes_of(model, rows) > 1]
    for rows in dict.fromkeys((sizes[0], *drafting[:1], sizes[-1])):
        of_rows = override(model.config, {"rollout.batch_size": rows * model.shards})
        only = ("update", *ROUNDS) if rows == sizes[0] else ROUNDS
        programs = compiling.compile_for(of_rows, target.name, only)["programs"]
        if lines := [line for one in programs for line in findings.failures(one)]:
            raise ConfigError("; ".join(lines))
        for one in programs:
            if one["program"] == "update":
                update = one["clock"]
            elif one["clock"]:
                slots = Model(of_rows, arch).shapes.cache
                costs[one["program"]].append(
                    seconds.cost(one["clock"], target.chip, rows, slots))
    if not update or not costs[ROUNDS[0]]:
        return candidate
    rest = {**seconds.least_rest(model, target.chip, trace),
            "update": seconds.update_seconds(model, target.chip, update)}
    round_of = seconds.clocked_round(
        seconds.least_round(model, target.chip), *costs.values())
    step = seconds.step(model, round_of, rest, trace)
    return candidate._replace(step=step)


def table(title: str, candidates: list[Candidate]) -> Table:
    """Returns layouts, one a line."""
    made = Table("data x fsdp x tensor", "rows", "micro-batch", "remat", "drafter", "GiB", "step",
                 "rollout", "without drafts", "update", "drafter's update", title=title)
    for values, needs, step in candidates:
        made.add_row(
            "x".join(str(values[f"mesh.{axis}"]) for axis in ("data", "fsdp", "tensor")),
            *(str(values[name]) for name in ("rollout.batch_size", "learner.micro_batch",
                                             "learner.remat", "spec.drafter")),
            f"{sum(needs.values()) / GIB:.1f}", *(f"{value:.1f}" for value in (
                step.seconds, step.parts["rollout"], step.plain, step.parts["update"],
                step.parts.get("drafter", 0))))
    return made


if __name__ == "__main__":
    config_flags.run(main)
