"""Measured costs on disk, so that a device and model are measured once.

A file is JSON: what it was measured for (`key`), when, and the arrays of a CostTable. Its name is a
digest of the key. Drivers and neighbours change without a name, so a file also grows stale.
"""

import json
import time
from pathlib import Path

import jax
import numpy as np

from specrl_jax.config import ConfigError, check
from specrl_jax.control.cost_model import CostTable
from specrl_jax.runtime.digest import digest
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.paths import local_path, output_directory, user_cache, writing
from specrl_jax.structs import Json, carrier

VERSION = 15  # of files; others are measured anew
FRESH = 30 * 24 * 3600.0  # seconds until a file is stale


def path_of(path: str, key: Json) -> Path | None:
    """Returns `path`; if it is empty, the file of `key` in the user's cache, or None without a
    cache."""
    if path:
        return local_path("control.cost_table", path)
    name, cache = digest([_plain(key).encode()])[:16], user_cache("cost")
    return cache and cache / f"{name}.json"


def check_place(path: str) -> None:
    """Raises ConfigError if `path`, which may be empty, is no file and cannot become one."""
    field = "control.cost_table"
    named = local_path(field, path)
    if path and not named.is_file():
        check(not named.exists(), field, path, "is a directory; name a file")
        output_directory(field, named.parent, new=False)


def _plain(key: Json) -> str:
    return json.dumps({**key, "version": VERSION}, sort_keys=True, default=str)


def store(path: Path, key: Json, costs: CostTable) -> None:
    """Replaces the file as a whole, so that a reader sees the old or the new one. Raises
    ConfigError if it cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(a).tolist() for name, a in vars(costs).items()}
    text = json.dumps({"key": json.loads(_plain(key)), "when": time.time(), "costs": arrays},
                      indent=1)
    write_atomically(path, text + "\n")


def load(path: Path, key: Json, like: CostTable, since: float = 0.0
         ) -> CostTable | None:
    """Returns the costs stored for `key`, shaped like `like`; None where there are none, or only
    some from before `since`, in seconds since 1970.

    Raises:
      ConfigError: the file holds no costs.
    """
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != json.loads(_plain(key)) or float(stored["when"]) < since:
            return None
        costs = carrier(CostTable, **{name: np.asarray(stored["costs"][name], np.float32)
                                      for name in vars(like)})
        jax.tree.map(lambda a, b: np.broadcast_shapes(a.shape, b.shape), costs, like)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(f"control.cost_table = {str(path)!r}: it holds no measured costs "
                          f"({type(problem).__name__}); remove it to measure again") from problem
    return costs
