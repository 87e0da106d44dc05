"""Measured launches on disk, so that a device and model are measured once.

A file is JSON: what it was measured for (`key`), when, and launches as rows of `points`. Its name
is a digest of the key, so another device, model or version reads another file. Drivers, firmware
and neighbours change too, without a name: so a file also grows stale with age.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specrl_jax.config import ConfigError
from specrl_jax.control.cost_model import Point

VERSION = 14  # of what is measured and how; older files are measured anew
FRESH = 30 * 24 * 3600.0  # seconds until a file is stale


class Record(NamedTuple):
    """What a file holds."""

    measured: Mapping[Point, float]  # seconds of launches
    error: float  # mean relative error of the fit on held-out launches
    seconds: float  # that measuring took
    when: float  # that was, in seconds since 1970


def default_path(key: Mapping[str, Any]) -> Path:
    """Where the launches of `key` are kept, in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(_plain(key).encode()).hexdigest()[:16]
    return Path(base) / "specrl_jax" / "cost" / f"{digest}.json"


def _plain(key: Mapping[str, Any]) -> str:
    return json.dumps(key | {"version": VERSION}, sort_keys=True, default=str)


def store(path: Path, key: Mapping[str, Any], record: Record) -> None:
    """Replaces the file as a whole, so that a reader sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({
        "key": json.loads(_plain(key)), "error": record.error, "seconds": record.seconds,
        "when": record.when, "columns": [*Point._fields, "seconds"],
        "points": [[*point, seconds] for point, seconds in record.measured.items()]}, indent=1)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def load(path: Path, key: Mapping[str, Any], since: float = 0.0) -> Record | None:
    """What was stored for `key`; None where nothing was, or for something else, or before `since`.

    Raises:
      ConfigError: the file is no such file.
    """
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != json.loads(_plain(key)):
            return None
        measured = {Point(*map(int, row[:-1])): float(row[-1]) for row in stored["points"]}
        record = Record(measured, *(float(stored[name]) for name in Record._fields[1:]))
    except (ValueError, KeyError, TypeError) as problem:
        raise ConfigError(f"control.cost_table = {str(path)!r}: it holds no measured launches "
                          f"({type(problem).__name__}); remove it to measure again") from problem
    return record if record.when >= since else None
