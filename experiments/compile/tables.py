"""Findings as text for a terminal."""

import json
import sys

from rich.console import Console
from rich.table import Table

from specrl_jax.runtime.hardware import GIB
from specrl_jax.structs import Json

from .findings import memory

WIDTH = 160  # columns where standard output is no terminal
DECIDED = ("while", "conditional")
NOTE = ("compiled for, never run: this says nothing about speed, numerics or hangs. GiB are of one "
        "device, beside what is resident; ops count a loop's body once; least ms by "
        "arithmetic over weights, cache and tokens")


def line(found: Json) -> str:
    """Returns one program's findings in a line, shown as soon as they are there."""
    if "error" in found:
        return f"{found['program']}: {found['error']}"
    how = "kept" if found["kept"] else f"compiled in {found['compile_seconds']:.0f} s"
    return f"{found['program']}: {how}, {memory(found) / GIB:.2f} GiB"


def text(result: Json) -> str:
    """Returns a result as JSON with a line for each program; of its kinds of operations, those that
    a host decides."""
    programs = [found | {"kinds": {kind: found["kinds"].get(kind, 0) for kind in DECIDED}}
                if "kinds" in found else found for found in result["programs"]]
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
                 "cache copies", "collectives", "least ms",
                 title=f"{result['target']}, {result['devices']} devices; {versions}",
                 caption=f"resident, GiB: {resident}\n{NOTE}")
    for found in result["programs"]:
        made.add_row(*(_row(found) if "error" not in found else [found["program"], "failed"]))
    return made


def _row(found: Json) -> list[str]:
    copies = sum(copy["count"] for copy in found["cache_copies"])
    moved = [f"{one['count']} {kind} {one['bytes'] / 2**20:.1f} MiB"
             for kind, one in found["collectives"].items()]
    least = found["least_seconds"]
    return [found["program"], f"{found['compile_seconds']:.1f}{' kept' if found['kept'] else ''}",
            f"{memory(found) / GIB:.2f} of {found['limit'] / GIB:.2f}",
            f"{found['peak'] / GIB:.2f}", f"{found['temporaries'] / GIB:.2f}",
            f"{found['aliased']} of {found['donated']}", str(found["operations"]), str(copies),
            "\n".join(moved), "" if least is None else f"{least * 1e3:.3g}"]
