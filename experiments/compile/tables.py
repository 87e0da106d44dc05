"""Findings as text for a terminal."""

import json
import sys

from rich.console import Console
from rich.table import Table

from specrl_jax.runtime.hardware import GIB
from specrl_jax.structs import Json

from .clock import costliest
from .findings import memory

WIDTH = 160  # columns where standard output is no terminal
DECIDED = ("while", "conditional")
NOTE = ("compiled for, never run: this says nothing about numerics or hangs. GiB are of one "
        "device, beside what is resident; ops count a loop's body once; least ms by arithmetic "
        "over weights, cache and tokens; clock ms by the TPU compiler's estimate, of branches the "
        "costliest")


def line(program: Json) -> str:
    """Returns one program's findings in a line, shown as soon as they are there."""
    if "error" in program:
        return f"{program['program']}: {program['error']}"
    how = "kept" if program["kept"] else f"compiled in {program['compile_seconds']:.0f} s"
    return f"{program['program']}: {how}, {memory(program) / GIB:.2f} GiB"


def text(result: Json) -> str:
    """Returns a result as JSON with a line for each program; of its kinds of operations, those that
    a host decides."""
    programs = [program | {"kinds": {kind: program["kinds"].get(kind, 0) for kind in DECIDED}}
                if "kinds" in program else program for program in result["programs"]]
    rest = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items()
            if name != "programs"]
    return "{" + ",\n".join([*rest, '"programs": [\n' + ",\n".join(
        map(json.dumps, programs)) + "]"]) + "}\n"


def show(result: Json) -> None:
    """Prints the table of a result."""
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(table(result))


def table(result: Json) -> Table:
    """Returns a row for each program."""
    resident = ", ".join(f"{name} {size / GIB:.2f}" for name, size in result["resident"].items())
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    made = Table("program", "seconds", "GiB of limit", "own", "temporary", "aliased", "ops",
                 "copies", "collectives", "least ms", "clock ms",
                 title=f"{result['target']}, {result['devices']} devices; {versions}",
                 caption=f"resident, GiB: {resident}\n{NOTE}")
    for program in result["programs"]:
        made.add_row(*(_row(program) if "error" not in program else [program["program"], "failed"]))
    return made


def _row(program: Json) -> list[str]:
    copies = sum(copy["count"] for copy in program["copies"])
    moved = [f"{one['count']} {kind} {one['bytes'] / 2**20:.1f} MiB"
             for kind, one in program["collectives"].items()]
    least, ticks = program["least_seconds"], program["clock"]
    return [program["program"],
            f"{program['compile_seconds']:.1f}{' kept' if program['kept'] else ''}",
            f"{memory(program) / GIB:.2f} of {program['limit'] / GIB:.2f}",
            f"{program['peak'] / GIB:.2f}", f"{program['temporaries'] / GIB:.2f}",
            f"{program['aliased']} of {program['donated']}", str(program["operations"]),
            str(copies), "\n".join(moved), "" if least is None else f"{least * 1e3:.3g}",
            "" if ticks is None else _clock(
                ticks, None if program["program"] == "update" else least)]  # of all micro-batches


def _clock(ticks: Json, least: float | None) -> str:
    """Returns the milliseconds of the costliest branches, how many times the least those are, and
    of each kernel how long its machine code takes over its bytes."""
    cycles = costliest(ticks["where"]).total()
    ms = ticks["milliseconds"] * cycles / max(ticks["cycles"], 1)
    over = f", {ms / 1e3 / least:.1f} x least" if least else ""
    kernels = [f"{name}: code " + (
        "unknown" if kernel["compute"] is None else
        f"{kernel['compute'] / max(kernel['memory'], 1):.2g} x memory")
        for name, kernel in ticks["kernels"].items()]
    return "\n".join([f"{ms:.3g}{over}", *kernels])
