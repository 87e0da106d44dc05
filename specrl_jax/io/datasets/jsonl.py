"""`jsonl`: a file with one JSON object a line; an example's id is its line number, from 1."""

from collections.abc import Callable

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.io.json_lines import read_json_lines
from specrl_jax.io.places import local_path
from specrl_jax.structs import Json


def load(data: DataConfig, say: Callable[[str], None]) -> list[Json]:
    """Returns the objects of the file at `data.path`, gzipped or not; empty lines are skipped.
    Raises ConfigError if there is no such file, or a line that is not a JSON object."""
    path = local_path("data.path", data.path)
    check(bool(data.path) and path.is_file(), "data.path", data.path,
          "no such file; name a file with one JSON object a line")
    return [_object(row, f"{path}:{number}") | {"id": number}
            for number, row in read_json_lines(path)]


def _object(row: Json, where: str) -> Json:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {str(row)[:60]!r} is not an object; write "
                          '{"question": ..., "answer": ...}')
    return row
