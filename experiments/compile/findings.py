"""What compiling one program showed, kept by the hash of all that it depends on."""

import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specrl_jax.runtime.compilation import Program
from specrl_jax.runtime.digest import digest
from specrl_jax.runtime.hardware import GIB, Chip
from specrl_jax.runtime.paths import user_cache
from specrl_jax.structs import Json

from . import clock, hlo, machine_code, programs, work
from .targets import LIBTPU_FLAGS, Target, versions

NO_ROOM = "does not fit:"
ROLLOUT = ("launch", "prefill", "feed", "copy_prompt", "select_rows", "plain", "drafted")
"""Programs whose donated arrays are large and change a little: a copy of one is a fault."""


def store() -> Path | None:
    """Returns the directory of kept findings, in the user's cache; None if none can be written."""
    return user_cache("compiled_for")


def key(lowered: Any, target: Target, dump: Path | None) -> str:
    """Returns the hash of a lowered module, the target, and what compiles and reads it, but for
    the directory that machine code is dumped to."""
    flags = [os.environ.get(name, "").replace(str(dump or ""), "") for name in (
        "XLA_FLAGS", LIBTPU_FLAGS)]
    files = (hlo.__file__, clock.__file__, machine_code.__file__, __file__)
    return digest([*(Path(file).read_bytes() for file in files), target.name, versions(), flags,
                   lowered.as_text()])


def find(program: Program, run: programs.Run, target: Target, chip: Chip, folder: Path | None,
         dump: Path | None = None, begin: Callable[[Json], None] = lambda event: None) -> Json:
    """Compiles a program, unless its findings are kept; returns them as JSON values.

    Args:
      chip: the figures of one device.
      folder: where findings are kept; None keeps none and reads none.
      dump: where the compiler dumps the machine code of kernels, if it does.
      begin: called with {"known", "path"} before the compiler runs: what is known without it, and
        the file of the findings, so that the end of this process can be kept there, too.
    """
    began = time.perf_counter()
    lowered = program.lower()
    lowering = time.perf_counter() - began
    least = work.least(work.Model(run.config, run.arch), program.title)
    known = {
        "program": program.title, "lowering_seconds": round(lowering, 2),
        "resident": programs.beside(program, run.resident), "limit": chip.limit,
        "least_seconds": least and chip.least_seconds(least.flops, least.moved)}
    path = None if folder is None else folder / f"{key(lowered, target, dump)}.json"
    if path is not None and path.exists():
        return known | {"kept": True} | json.loads(path.read_text(encoding="utf-8"))
    begin({"known": known, "path": "" if path is None else str(path)})
    try:
        finding = _compile(lowered, program, chip, dump)
    except Exception as error:  # noqa: BLE001  whatever the compiler raises is a finding
        finding = {"error": one_line(error)}
    if path is not None:
        keep(path, finding)
    return known | {"kept": False} | finding


def keep(path: Path, finding: Json) -> None:
    """Writes findings of a program for later calls."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(finding), encoding="utf-8")
    partial.replace(path)


def one_line(error: Exception) -> str:
    """Returns what an error of JAX or a compiler says first; of too little memory, how much."""
    text = str(error)
    if match := re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm. Exceeded hbm capacity by "
                          r"([\d.]+\w)", text):
        return f"{NO_ROOM} the compiler needs {match[1]} of {match[2]}, {match[3]} too much"
    if match := re.search(r"temporaries \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)", text):
        return f"{NO_ROOM} its temporaries alone need {match[1]} of {match[2]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:400] if lines else ''}"


def _compile(lowered: Any, program: Program, chip: Chip, dump: Path | None) -> Json:
    if dump:
        machine_code.take(dump)  # of a program that failed
    began = time.perf_counter()
    compiled = lowered.compile(compiler_options=program.options)
    seconds = time.perf_counter() - began
    memory, module = compiled.memory_analysis(), hlo.parse(compiled.as_text())
    arrays = [arg for arg in jax.tree.leaves(program.args) if hasattr(arg, "shape")]  # not static
    donated = [arg for arg, info in zip(arrays, jax.tree.leaves(lowered.args_info), strict=True)
               if info.donated]
    return {
        "compile_seconds": round(seconds, 2), "peak": memory.peak_memory_in_bytes,
        "arguments": memory.argument_size_in_bytes, "results": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes, "host": memory.host_temp_size_in_bytes,
        "donated": len(donated), "aliased": module.aliased,
        "aliased_bytes": memory.alias_size_in_bytes, "operations": hlo.operations(module),
        "kinds": hlo.kinds(module), "collectives": hlo.collectives(module),
        "copies": hlo.large_copies(module, set(map(_on_device, donated))),
        "clock": clock.account(module, chip, machine_code.take(dump) if dump else {})}


def _on_device(argument: Any) -> tuple[str, int]:
    """Returns an argument's dtype, as HLO names it, and its elements on one device."""
    kind = argument.dtype.name
    for word, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        kind = kind.replace(word, short)
    shape = argument.shape if argument.sharding is None else argument.sharding.shard_shape(
        argument.shape)
    return kind.replace("bool", "pred"), math.prod(shape)


def memory(finding: Json) -> int:
    """Returns the bytes on a device of a program and of what is resident beside it."""
    return finding["peak"] + sum(finding["resident"].values())


def failures(finding: Json) -> list[str]:
    """Returns one line for each reason why a program cannot be used, "" never."""
    name, lines = finding["program"], []
    if "error" in finding:
        hint = f"; {way_out(name)}" if finding["error"].startswith(NO_ROOM) else ""
        return [f"{name}: {finding['error']}{hint}"]
    needed = memory(finding)
    over = needed - finding["limit"]
    if over > 0:
        lines.append(
            f"{name}: {NO_ROOM} {needed / GIB:.2f} GiB of {finding['limit'] / GIB:.2f}, "
            f"{over / GIB:.2f} too much: {finding['peak'] / GIB:.2f} of its own beside "
            f"{_parts(finding['resident'])}; {way_out(name)}")
    for copy in finding["copies"] if name.split()[0] in ROLLOUT else []:
        where = "in a loop" if copy["in_loop"] else "at its edge"
        lines.append(f"{name}: {copy['count']} x {copy['kind']} of a carried or "
                     f"donated array's {copy['bytes'] / 2**20:.0f} MiB {where}")
    return lines


def way_out(name: str) -> str:
    """Returns what to change where a program does not fit."""
    first = name.split()[0]
    if first in ROLLOUT:
        return "lower rollout.batch_size or rollout.max_new_tokens, or raise mesh.tensor"
    if first in ("update", "compute_logprobs", "gap"):
        return "lower learner.micro_batch, set learner.remat, or raise mesh.fsdp or mesh.tensor"
    if first == "drafter":
        return "lower distill.micro_batch, or raise mesh.tensor"
    return "raise mesh.fsdp or mesh.tensor"


def _parts(resident: dict[str, int]) -> str:
    parts = [f"{name} {size / GIB:.2f}" for name, size in resident.items()]
    return ", ".join(parts) or "nothing"
