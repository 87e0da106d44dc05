"""`hf`: a dataset of the Hugging Face hub, or local files of its kinds (extra `hf`)."""

import importlib
import re
from collections.abc import Callable
from typing import Any

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.runtime.paths import local_path
from specrl_jax.structs import Json

try:
    datasets: Any = importlib.import_module("datasets")
except ImportError as error:
    raise ConfigError(f"data.name = 'hf': {error}; install the extra by pip install "
                      "'specrl-jax[hf]', or write the data as JSON lines") from error

KINDS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
ON_DISK = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves


def load(data: DataConfig, say: Callable[[str], None]) -> list[Json]:
    """Returns a split of the dataset at `data.path`; an example's id is its index.

    That is ORG/NAME of the hub with its configuration `data.subset`, a directory with data files
    or one that `save_to_disk` wrote, or a file, whose rows are all of one split.

    Raises:
      ConfigError: there is no such dataset, configuration, split or field, the hub cannot be
        reached, or files are damaged.
    """
    check(bool(data.path), "data.path", data.path,
          "name a dataset of the hub as ORG/NAME, a directory, or a Parquet file")
    datasets.disable_progress_bars()
    try:
        table = _open(data)
    except Exception as error:  # of many types: network, files, names
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"data.path = {data.path!r}: cannot be read as split {data.split!r}"
                          f"{data.subset and f' of {data.subset}'} ({line[:200]}); give ORG/NAME "
                          "of a hub that can be reached, or a local directory or Parquet file"
                          ) from error
    for name in ("question", "answer"):
        field = getattr(data, f"{name}_field")
        check(field in table.column_names, f"data.{name}_field", field,
              f"{data.path} has no such field; it has {', '.join(table.column_names)}")
    rows = table.select(range(min(data.examples or len(table), len(table))))
    return [row | {"id": index} for index, row in enumerate(rows)]


def _open(data: DataConfig) -> Any:
    """Returns the split as a datasets.Dataset."""
    path, subset = local_path("data.path", data.path), data.subset or None
    if path.is_file():
        whole = re.sub(r"^\w+", "train", data.split)  # the one split that a file has
        return datasets.load_dataset(KINDS.get(path.suffix, "json"), data_files=str(path),
                                     split=whole)
    if any((path / name).exists() for name in ON_DISK):
        loaded = datasets.load_from_disk(str(path))
        return loaded[data.split] if isinstance(loaded, datasets.DatasetDict) else loaded
    return datasets.load_dataset(str(path) if path.exists() else data.path, subset,
                                 split=data.split)
