"""`jsonl`: files with one JSON object per line. An example's id is its line number, from 1; those
of a further file count on."""

import glob
import os
from collections.abc import Callable
from pathlib import Path

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.runtime.json_lines import read_json_lines
from specrl_jax.runtime.paths import local_path
from specrl_jax.structs import Json


def load(data: DataConfig, say: Callable[[str], None]) -> list[Json]:
    """Returns the objects of the files at `data.path`, gzipped or not; empty lines are skipped.

    Raises:
      ConfigError: there is no such file, or a line is not a JSON object, or lacks a field; the line
        is named.
    """
    rows, before = [], 0
    for path in files(data.path):
        number = 0
        for number, row in read_json_lines(path):
            rows.append(_example(row, data, f"{path}:{number}") | {"id": before + number})
        before += number
    return rows


def files(paths: str) -> list[Path]:
    """Returns the files that a path, a pattern or a comma list of them names, each once.
    Raises ConfigError if one of them names none."""
    matched: dict[Path, None] = {}
    for part in [paths] if os.path.isfile(paths) else paths.split(","):
        path = local_path("data.path", part.strip())
        named = [path] if os.path.isfile(path) else [
            Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        named = [name for name in named if name.is_file()]
        check(bool(part.strip()) and bool(named), "data.path", part,
              "no such file; name a file with one JSON object per line, a pattern such as "
              "'data/*.jsonl.gz', or several with commas")
        matched |= dict.fromkeys(named)
    return list(matched)


def _example(row: Json, data: DataConfig, where: str) -> Json:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {str(row)[:60]!r} is not an object; write "
                          '{"question": ..., "answer": ...}')
    for name in ("question", "answer"):
        field = getattr(data, f"{name}_field")
        check(field in row, f"data.{name}_field", field,
              f"{where} has no such field; it has {', '.join(row)}")
    return row
