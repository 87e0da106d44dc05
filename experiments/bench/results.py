"""The result file of a benchmark: where it lies, what it begins with, and earlier cases of it."""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from specrl_jax.config import Config, ConfigError, as_dict
from specrl_jax.runtime.paths import output_file

from .hardware import machine
from .json_file import write as write

DIRECTORY = Path(__file__).resolve().parents[1] / "results"


def define_flags(repeats: int) -> None:
    """Defines --out and --repeats."""
    flags.DEFINE_string("out", None, "JSON file (default: bench_NAME.json in experiments/results)")
    flags.DEFINE_integer("repeats", repeats, "timed runs of each contender", lower_bound=1)


def positive(flag: str, values: Sequence[str]) -> list[int]:
    """Returns the values of a list flag as positive integers.

    Raises:
      ConfigError: one of them is something else.
    """
    for value in values or [""]:
        if not (value.isdigit() and int(value)):
            raise ConfigError(f"--{flag}={value}: give positive numbers, such as 1,4,16")
    return [int(value) for value in values]


def among(flag: str, values: Sequence[str], known: Iterable[str]) -> None:
    """
    Raises:
      ConfigError: a value of the flag is not a known one.
    """
    for value in values:
        if value not in known:
            raise ConfigError(f"--{flag}={value}: choose some of {', '.join(known)}")


def command(argv: Sequence[str]) -> str:
    """Returns the command line as it is typed in the repository."""
    script = f"experiments/{Path(argv[0]).name}".split()  # bench.py has its NAME here
    return shlex.join(["python", *script, *argv[1:]])


def refuse_workdir() -> None:
    """
    Raises:
      ConfigError: --workdir is set, which no benchmark writes.
    """
    workdir = flags.FLAGS.workdir
    if workdir is not None:
        raise ConfigError(f"--workdir={workdir}: a benchmark writes one file; name it with --out")


def destination(out: str | None, default: str) -> Path:
    """Returns the path to write: `out`, or `default` in experiments/results.

    Raises:
      ConfigError: it cannot be written.
    """
    if out is None:
        DIRECTORY.mkdir(exist_ok=True)
    return output_file("--out", out or DIRECTORY / default)


def blank(config: Config, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a result without cases."""
    return {"command": command(sys.argv), "machine": machine(packages),
            "config": as_dict(config), "cases": {}}


def earlier(path: Path, **same: Any) -> dict[str, Any]:
    """Returns the cases of an earlier result; {} if there is no file.

    Args:
      same: other entries that the file must hold with these values.

    Raises:
      ConfigError: the file is no result, or an entry of `same` differs.
    """
    if not path.exists():
        return {}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        cases = result["cases"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--out={path}: it is no result of a benchmark, so --resume cannot read "
                          f"it; remove it or name another file") from error
    for name, value in same.items():
        if result.get(name) != json.loads(json.dumps(value)):
            raise ConfigError(f"--out={path}: it was made with another {name} or names none, so "
                              "--resume cannot keep its cases; remove it or name another file")
    return cases

