"""The process that compiles: reads a request from stdin, writes a line of JSON for each event.

It ends with whoever started it: when stdin does.

    {"programs": [...], "resident": {...}}   what there is
    {"begin": "launch 16"}                   so that whoever started it knows what a crash was about
    {"known": {...}, "path": "..."}          what is known of it before the compiler runs
    {"done": {...}}                          the findings, or {"program", "error"}
    {"refused": "..."}                       a ConfigError: nothing was compiled
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import TextIO

from specrl_jax.config import Config, ConfigError, build
from specrl_jax.runtime.compilation import Program
from specrl_jax.sharding import make_mesh
from specrl_jax.structs import Json

from . import findings, programs, targets

FD = "SPECRL_EVENTS"  # number of the file that events are written to


def main() -> None:
    """Runs one request."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with os.fdopen(int(os.environ[FD]), "w", encoding="utf-8") as events:
        try:
            compile_all(request, events)
        except ConfigError as error:
            _say(events, {"refused": str(error)})


def compile_all(request: Json, events: TextIO) -> None:
    """Compiles what is asked for.

    Args:
      request: config, target, only (titles' beginnings, [] is all), skip (titles), part [k, n] of
        the programs, keep, a directory or "", and dump, where libtpu dumps, or "".
    """
    target = targets.parse(request["target"])
    devices = targets.devices(target)
    config = build(Config, request["config"])
    try:
        mesh = make_mesh(config.mesh, devices)
    except ConfigError as error:
        raise ConfigError(f"{error}; the target is {target.name} of {len(devices)}") from error
    run = programs.describe(config, mesh)
    chip = targets.limits(target, devices[0])
    described, failed = _described(run)
    chosen = [p for p in described
              if not request["only"] or p.title.startswith(tuple(request["only"]))]
    _say(events, {"programs": [p.title for p in chosen] + [f["program"] for f in failed],
                  "devices": len(devices),
                  "resident": {name: programs.device_bytes(tree)
                               for name, tree in run.resident.items()}})
    part, parts = request["part"]
    for finding in failed if part == 0 and not request["skip"] else []:
        _say(events, {"done": finding})
    for program in chosen[part::parts]:
        if program.title in request["skip"]:
            continue
        _say(events, {"begin": program.title})
        folder, dump = (Path(request[name]) if request[name] else None
                        for name in ("keep", "dump"))
        try:
            finding = findings.find(program, run, target, chip, folder, dump,
                                    lambda event: _say(events, event))
        except Exception as error:  # noqa: BLE001  of tracing and lowering
            finding = {"program": program.title, "error": findings.one_line(error)}
        _say(events, {"done": finding})


def _described(run: programs.Run) -> tuple[list[Program], list[Json]]:
    """Returns the programs, and a failure for each part of the run that cannot be traced."""
    described, failed = [], []
    for name, group in run.groups().items():
        try:
            described += group
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  whatever tracing raises is a finding
            failed.append({"program": f"{name} (tracing)", "error": findings.one_line(error)})
    return described, failed


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


def _say(events: TextIO, event: Json) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


if __name__ == "__main__":
    main()
