"""The TPU compiler's own estimate of a program's cycles, added up by loop and by part.

It counts memory, but nothing of stragglers, the host, or links under load: an estimate to compare
programs with, not a time. Kernels and collectives have none. A kernel counts the bundles of its
machine code times its steps, or the bytes it moves over the bandwidth if those take longer;
collectives count bytes over the bandwidth of the links.
"""

import collections
from collections.abc import Iterator, Mapping

from specrl_jax.runtime.hardware import Chip
from specrl_jax.structs import Json

from .hlo import COLLECTIVES, QUIET, Instruction, Module
from .machine_code import Bundles

# Hertz, from the published peaks: 2 FLOPs a cell of 128 x 128 or, on v6e, 256 x 256 a matrix unit.
CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
# Bytes/s that a chip sends to its neighbours, one direction: half of what the vendors give for both
# (TPU: inter-chip interconnect, cloud.google.com/tpu/docs; GPU: NVLink of the SXM modules).
LINKS = {"v4": 150e9, "v5e": 100e9, "v5p": 300e9, "v6e": 200e9, "a100": 300e9, "h100": 450e9,
         "h200": 450e9, "b200": 900e9}
KERNELS = {"tree_attention": "attention", "cache_append": "append", "row_append": "append",
           "head_argmax": "head and draw"}
SCOPES = ("drafter", "append", "draw")  # of jax.named_scope, outermost first
OUTSIDE = "outside of loops"
UNKNOWN = 1  # trips of a loop whose length depends on data: a launch's rounds


def account(module: Module, chip: Chip, bundles: Mapping[str, Bundles]) -> Json | None:
    """Returns a program's estimated cycles; None for a chip without a clock.

    Args:
      bundles: of the kernels' machine code, by instruction; a kernel without counts bytes.

    Returns:
      {"cycles": total, "milliseconds", "where": cycles by loop and branch, and there by part,
      "parts": by part, "kernels": for each {"compute": cycles of bundles or None, "memory": of
      bytes, "steps"} of all its calls, "unestimated": how many operations have no estimate}. A
      loop's body counts as often as it runs, if the compiler knows that, else once; of branches all
      are in the total.
    """
    clock = CLOCKS.get(chip.name)
    if clock is None:
        return None
    where: dict[str, collections.Counter[str]] = {}
    kernels: dict[str, Json] = {}
    unestimated = 0
    like = {_call(i): bundles[i.name] for i, *_ in _running(module) if i.name in bundles}
    for instruction, times, place, outer in _running(module):
        cycles, part = instruction.cycles, _part(instruction, times, outer)
        if part in KERNELS.values() and instruction.kind == "custom-call":
            # Of calls that are alike the compiler dumps one.
            own = bundles.get(instruction.name) or like.get(_call(instruction))
            compute = own and own.cycles(instruction.steps, instruction.trips)
            memory = round(instruction.moved / chip.bandwidth * clock)
            cycles = max(memory, compute or 0)
            _add(kernels.setdefault(instruction.name.partition(".")[0], {}), {
                "compute": compute and compute * times, "memory": memory * times,
                "steps": instruction.steps * times})
        elif part == "collectives":
            cycles = round(instruction.size / LINKS[chip.name] * clock)
        unestimated += cycles is None
        where.setdefault(place or OUTSIDE, collections.Counter())[part] += (cycles or 0) * times
    parts = sum(where.values(), collections.Counter())
    total = sum(parts.values())
    return {"cycles": total, "milliseconds": round(total / clock * 1e3, 4),
            "where": {place: dict(each) for place, each in where.items()},
            "parts": dict(parts.most_common()), "kernels": kernels, "unestimated": unestimated}


def costliest(where: Mapping[str, Mapping[str, float]]) -> collections.Counter[str]:
    """Returns the cycles by part of an account's `where`, with the costliest branch alone of each
    conditional."""
    inner: dict[str, dict[str, Mapping[str, float]]] = {}
    parts: collections.Counter[str] = collections.Counter()
    for place, each in where.items():
        if place.startswith("/"):
            first, slash, rest = place[1:].partition("/")
            inner.setdefault(first, {})[slash + rest] = each
        else:
            parts.update(each)
    of_inner = {name: costliest(places) for name, places in inner.items()}
    branches = [each for name, each in of_inner.items() if name.startswith("branch")]
    for each in (each for name, each in of_inner.items() if not name.startswith("branch")):
        parts.update(each)
    parts.update(max(branches, key=collections.Counter.total, default=collections.Counter()))
    return parts


def _call(instruction: Instruction) -> tuple[str, int, int, int]:
    name = instruction.name.partition(".")[0]
    return name, instruction.steps, instruction.trips, instruction.moved


def _add(total: Json, more: Json) -> None:
    for name, value in more.items():
        sums = total.setdefault(name, 0)
        total[name] = None if sums is None or value is None else sums + value


def _part(instruction: Instruction, times: int, outer: str) -> str:
    for name, part in KERNELS.items():
        if instruction.kind == "custom-call" and instruction.name.startswith(name):
            return part
    if instruction.starts in COLLECTIVES:
        return "collectives"
    path = f"{outer}/{instruction.operation}".split("/")
    for scope in SCOPES:
        if scope in path:
            return scope
    if "dot_general" in path[-1]:
        return "products"
    return "small operations in layers" if times > 1 else "rest"


def _running(module: Module) -> Iterator[tuple[Instruction, int, str, str]]:
    """Yields (instruction, how often it runs, loops and branches around it, the operation of the
    innermost loop, which names parts where the compiler made the loop) of all that runs."""
    def walk(name: str, times: int, place: str, outer: str
             ) -> Iterator[tuple[Instruction, int, str, str]]:
        for instruction in module.computations.get(name, ()):
            kind, called = instruction.kind, instruction.called
            if kind in QUIET or kind.endswith(("-done", "-update")):
                continue
            if kind == "while":
                count = _trips(module, name, instruction)
                yield from walk(called["body"][0], times * (count or UNKNOWN),
                                f"{place}/loop x{count or '?'}", instruction.operation)
            elif kind == "conditional":
                branches = called.get("branch_computations") or (
                    *called.get("true_computation", ()), *called.get("false_computation", ()))
                for i, branch in enumerate(branches):
                    yield from walk(branch, times, f"{place}/branch {i}", outer)
            elif kind == "call":
                for inner in called.get("to_apply", ()):
                    yield from walk(inner, times, place, outer)
            else:
                yield instruction, times, place, outer

    return walk(module.entry, 1, "", "")


def _trips(module: Module, where: str, loop: Instruction) -> int | None:
    """Returns how often a loop runs: the bound that its condition compares with, which is a
    constant there or in the tuple that enters."""
    named = {i.name: i for i in module.computations[where]}
    start, = (named.get(name) for name in loop.operands[:1]) or (None,)
    inner = {i.name: i for i in module.computations.get(loop.called["condition"][0], ())}
    for instruction in inner.values():
        if instruction.kind not in ("compare", "fusion"):
            continue
        for operand in instruction.operands:
            bound = _constant(inner, operand)
            element = inner.get(operand)
            if bound is None and start and element and element.kind == "get-tuple-element":
                bound = _constant(named, start.operands[element.value or 0])
            if bound and bound > 1:
                return bound
    return None


def _constant(named: dict[str, Instruction], name: str) -> int | None:
    """Returns the integer that an instruction is, through copies; None if it is none."""
    instruction = named.get(name)
    if instruction is None:
        return None
    if instruction.kind in ("copy", "bitcast", "broadcast", "convert") and instruction.operands:
        return _constant(named, instruction.operands[0])
    return instruction.value if instruction.kind == "constant" else None
