"""Which files a run's working directory has, and its configuration there."""

import json
import os
from pathlib import Path

import jax

from specrl_jax.config import ConfigError, check
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.paths import output_directory
from specrl_jax.structs import Json

CONFIG, METRICS, SAMPLES = "config.json", "metrics.jsonl", "samples.jsonl"
BEST_FILE, REPORT = "best.json", "report.html"
FORMAT = 2  # of a run's config.json; up to version 0.2.0 it names none


def read_config(workdir: str | Path) -> Json | None:
    """Returns the configuration that a run was started with; None if there is no run. Raises
    ConfigError if config.json cannot be read, has another format, or is missing although
    metrics.jsonl is there."""
    path = Path(workdir) / CONFIG
    stored = read_object(path)
    if stored is None:
        if (Path(workdir) / METRICS).exists():
            raise ConfigError(f"{path} is missing although {METRICS} is there: choose another "
                              "workdir")
        return None
    check_format(path, stored.pop("format", None))
    return stored


def check_format(path: Path, stored: object) -> None:
    """Raises ConfigError unless `stored`, the format that `path` names, is FORMAT."""
    if stored is None:
        raise ConfigError(f"{path}: a run of version 0.2.0 or older, which this version cannot "
                          "read; write its model with export.py of 0.2.0, name that in "
                          "model.path, and choose another workdir")
    if stored != FORMAT:
        raise ConfigError(f"{path}: format {stored!r}, but this version reads format {FORMAT}; use "
                          "the version that wrote it, or choose another workdir")


def read_object(path: Path) -> Json | None:
    """Returns the object in a JSON file, None if there is no file."""
    try:
        stored = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): choose another workdir") from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{path} does not hold an object: choose another workdir")
    return stored


def make_workdir(workdir: str | Path) -> None:
    """Creates the directory if it is missing; raises ConfigError if it cannot be created."""
    output_directory("workdir", workdir, new=False).mkdir(parents=True, exist_ok=True)


def result_directory(workdir: Path, name: str) -> Path:
    """Returns WORKDIR/name, a directory that the end of a run writes, or replaces where this run
    wrote it before. Raises ConfigError if something else is there."""
    path = workdir / name
    own = path.is_dir() and not path.is_symlink() and (workdir / CONFIG).exists()
    check(own or not os.path.lexists(path), "workdir", str(workdir), f"{path} exists already and "
          "was not written by a run; choose another workdir")
    return path


def write_config(workdir: str | Path, config: Json) -> None:
    """Writes config.json atomically and creates the directory; only in process 0."""
    if jax.process_index() == 0:
        make_workdir(workdir)
        write_atomically(Path(workdir) / CONFIG, json.dumps(
            {"format": FORMAT} | config, indent=2) + "\n")


def flat(tree: Json, prefix: str = "") -> Json:
    """Returns the values of a nested dict by dotted name."""
    out: Json = {}
    for name, value in tree.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {
            prefix + name: value}
    return out
