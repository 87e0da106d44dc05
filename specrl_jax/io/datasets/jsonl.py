"""`jsonl`: a file with one JSON object a line; an example's id is its line number, from 1."""

import json
from collections.abc import Callable
from pathlib import Path

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.io.places import local_path
from specrl_jax.structs import Json


def load(data: DataConfig, say: Callable[[str], None]) -> list[Json]:
    """Returns the objects of the file at `data.path`; empty lines are skipped. Raises ConfigError
    if there is no such file, or a line that is not a JSON object."""
    path = local_path("data.path", data.path)
    check(bool(data.path) and path.is_file(), "data.path", data.path,
          "no such file; name a file with one JSON object a line")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path = {data.path!r}: {error}; save it as UTF-8") from error
    return [_parse(line, path, number) | {"id": number}
            for number, line in enumerate(lines, 1) if line.strip()]


def _parse(line: str, path: Path, number: int) -> Json:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: {line.strip()[:60]!r} is not JSON ({error}); "
                          "correct that line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{path}:{number}: {line.strip()[:60]!r} is not an object; write "
                          '{"question": ..., "answer": ...}')
    return row
