"""Result files: one JSON object, rewritten whole after each case."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from specrl_jax.config import Config, ConfigError, as_dict
from specrl_jax.io.metrics import write_atomically

from .hardware import machine

FLAT = re.compile(r"([\[{])\n *([^][{}]*?)\n *([]}])")
DIRECTORY = Path(__file__).resolve().parents[1] / "results"


def command(argv: Sequence[str]) -> str:
    """The command line as it is typed in the repository."""
    return shlex.join(["python", f"experiments/{Path(argv[0]).name}", *argv[1:]])


def refuse_workdir() -> None:
    """
    Raises:
      ConfigError: --workdir is set, which no benchmark writes.
    """
    workdir = flags.FLAGS.workdir
    if workdir is not None:
        raise ConfigError(f"--workdir={workdir}: a benchmark writes one file; name it with --out")


def destination(out: str | None, default: str) -> Path:
    """
    Raises:
      ConfigError: the directory of `out` is missing.
    """
    path = Path(out) if out else DIRECTORY / default
    if out is None:
        DIRECTORY.mkdir(exist_ok=True)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out={out}: {path.parent} is no directory; make it first")
    return path


def blank(config: Config, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """A result without cases."""
    return {"command": command(sys.argv), "machine": machine(packages),
            "config": as_dict(config), "cases": {}}


def earlier(path: Path, **same: Any) -> dict[str, Any]:
    """The cases that a file already holds; {} if there is none.

    Args:
      same: what the file must hold beside them.

    Raises:
      ConfigError: the file is something else, or was made with something else.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        cases = found["cases"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--out={path}: it is no result of a benchmark, so --resume cannot read "
                          f"it; remove it or name another file") from error
    for name, value in same.items():
        if found.get(name) != json.loads(json.dumps(value)):
            raise ConfigError(f"--out={path}: it was made with another {name} or tells none, so "
                              "--resume cannot keep its cases; remove it or name another file")
    return cases


def write(path: Path, result: dict[str, Any]) -> None:
    """Indented, but for lists and objects that hold no others, which take a line each."""
    text = json.dumps(result, indent=1)  # in which a line break is never inside of a string
    text = FLAT.sub(lambda found: found[1] + re.sub(r"\n *", " ", found[2]) + found[3], text)
    write_atomically(path, [text + "\n"])
