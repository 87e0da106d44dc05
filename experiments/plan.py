"""Plans a run on a pod: which mesh, rows, micro-batch and remat make its RL steps short.

    python experiments/plan.py --config=qwen2_5_7b --target=v5p:4x4x4 --nocompile

Layouts that do not fit a device's memory are refused by arithmetic. The others are ranked by the
predicted seconds of a step: the least time of each program by its FLOPs and bytes, over the share
of a device's peak that such a program is to reach. The lengths of responses and the acceptance of
drafts come from --trace. It predicts an order, not seconds: nothing is measured. The best three are
compiled, the update and the largest launch, where the target's compiler is installed
(compile_for.py); --nocompile leaves that out. --noplain leaves out layouts without the drafter.
Exit status 1 if one of the best does not compile or fit.
"""

import math
import sys
from pathlib import Path

import config_flags
from absl import flags
from bench import json_file
from compile import candidates, compiling, findings, predict, targets, traces
from compile.candidates import Candidate, Plan, shown
from compile.predict import Machine
from compile.work import Model
from rich.console import Console
from rich.table import Table

from specrl_jax.config import Config, check, override
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.published import without_weights
from specrl_jax.model.weights import describe_source
from specrl_jax.runtime.hardware import GIB
from specrl_jax.runtime.paths import output_file
from specrl_jax.structs import Json

TARGET = flags.DEFINE_string("target", None, "devices, such as v6e:4x4, v5p:4x4x4 or h100:8")
TRACE = flags.DEFINE_string("trace", "", "lengths and acceptance: a run's directory or a JSON file "
                            "(default: the repository's own)")
COMPILE = flags.DEFINE_bool("compile", True, "compile the update and the largest launch of the "
                            "best three")
PLAIN = flags.DEFINE_bool("plain", True, "consider layouts without the drafter, too")
OUT = flags.DEFINE_string("out", None, "write the plan to this JSON file, too")
SHOWN, COMPILED = 8, 3


def main(config: Config, workdir: Path) -> int:
    del workdir
    machine, trace = machine_of(TARGET.value), traces.read(TRACE.value)
    out = OUT.value and output_file("--out", OUT.value)
    check(PLAIN.value or config.spec.drafter != "off", "spec.drafter", "off",
          "--noplain leaves no layout; name a drafter or drop it")
    if COMPILE.value:
        targets.check_packages(targets.parse(TARGET.value))
    config = without_weights(config)
    arch = describe_source(config.model.path, family=config.model.family).arch
    plans = candidates.plan(config, arch, machine, trace, plain=PLAIN.value)
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False, soft_wrap=True)
    console.print(table(plans))
    for line in said(plans, config, arch, machine, trace):
        console.print(line)
    made = record(plans, trace)
    failures = []
    for candidate in plans.best[:COMPILED] if COMPILE.value else ():
        result, lines = compiled(config, candidate, TARGET.value)
        failures += lines
        made.setdefault("compiled", []).append(result)
        console.print(f"compiled {shown(candidate.values)}: " + ("; ".join(lines) or "fits"))
    if out:
        json_file.write(out, made)
    return 1 if failures else 0


def compiled(config: Config, candidate: Candidate, target: str) -> tuple[Json, list[str]]:
    """Compiles the update and the largest launch; returns the findings and a line a failure."""
    config = override(config, candidate.values)
    largest = config.rollout.batch_size // (config.mesh.data * config.mesh.fsdp)
    result = compiling.compile_for(config, target, ("update", f"launch {largest}"))
    keys = ("program", "error", "compile_seconds", "limit", "least_seconds")
    programs = [{key: one[key] for key in keys if key in one}
                | ({} if "error" in one else {"memory": findings.memory(one)})
                for one in result["programs"]]
    lines = [line for one in result["programs"] for line in findings.failures(one)]
    return {"layout": shown(candidate.values), "programs": programs}, lines


def machine_of(target: str | None) -> Machine:
    """Returns the machine that --target names. Raises ConfigError if there is none."""
    parsed = targets.parse(target or "")
    sizes = [int(size) for size in parsed.topology.split("x")]
    return Machine(parsed.chip, math.prod(sizes))


def table(plan: Plan) -> Table:
    """Returns the fastest layouts, one a line."""
    made = Table("data x fsdp x tensor", "rows", "micro-batch", "remat", "drafter", "GiB", "step s",
                 "rollout", "update", "drafter s", "bound")
    for candidate in plan.best[:SHOWN]:
        values, parts = candidate.values, candidate.step.parts
        made.add_row(
            "x".join(str(values[f"mesh.{axis}"]) for axis in ("data", "fsdp", "tensor")),
            *(str(values[name]) for name in ("rollout.batch_size", "learner.micro_batch",
                                             "learner.remat", "spec.drafter")),
            f"{candidate.gib:.1f}", f"{candidate.step.seconds:.1f}", f"{parts['rollout']:.1f}",
            f"{parts['update']:.1f}", f"{parts.get('drafter', 0):.1f}", candidate.step.bound)
    return made


def said(plan: Plan, config: Config, arch: Architecture, machine: Machine, trace: traces.Trace
         ) -> list[str]:
    """Returns what a plan says beyond its table, line by line."""
    first, drafting = plan.ranked[0], [c for c in plan.ranked if c.drafts]
    lines = [f"trace: {trace.name}", f"the step is bound by its {first.step.bound}"]
    if drafting:
        best = drafting[0]
        rollout, parts = best.step.rollout, best.step.parts
        least = predict.break_even(Model(override(config, best.values), arch), machine, trace)
        lines.append(
            f"speculation saves {rollout.plain_seconds - rollout.seconds:.1f} of "
            f"{rollout.plain_seconds:.1f} s of rollout at acceptance "
            f"{', '.join(f'{rate:.2f}' for rate in trace.acceptance)}, drafting in "
            f"{rollout.drafting:.0%} of its rounds; "
            + (f"it pays from {least:.2f}" if least is not None else "it never pays")
            + f"; the drafter's training costs {parts.get('drafter', 0):.1f} s")
    refused = sorted(plan.refused.items(), key=lambda item: -item[1])
    lines += [f"refused {count} layouts: {reason}" for reason, count in refused]
    needs = ", ".join(f"{name} {size / GIB:.1f}" for name, size in first.memory.items())
    flags = " ".join(f"--config.{name}={value}" for name, value in first.values.items())
    return [*lines, f"GiB a device: {needs}, of {machine.chip.available / GIB:.1f}", flags]


def record(plan: Plan, trace: traces.Trace) -> Json:
    """Returns a plan as JSON values."""
    return {"trace": trace.name, "refused": plan.refused,
            "ranked": [_recorded(candidate) for candidate in plan.best[:SHOWN]]}


def _recorded(candidate: Candidate) -> Json:
    step = candidate.step
    return {"layout": shown(candidate.values), "values": candidate.values,
            "seconds": {name: round(value, 3) for name, value in step.parts.items()},
            "plain_rollout_seconds": round(step.rollout.plain_seconds, 3), "bound": step.bound,
            "gib": {name: round(size / GIB, 2) for name, size in candidate.memory.items()}}


if __name__ == "__main__":
    config_flags.run(main)
