"""Datasets that TFDS prepares once and reads at random, without TensorFlow.

They share one schema:

  id        int64, unique in a dataset over all its splits
  question  text, the user's message
  answer    text, the final number, without commas or units
  solution  text, worked steps that end with a line "#### answer"
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.constants import DATA_DIR

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.runtime.paths import local_path

FILE_FORMAT = "array_record"  # the only one that TFDS reads at random without TensorFlow


class OrderedTextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A builder that writes array_record by default and keeps the order of generation."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, file_format: Any = FILE_FORMAT, **kwargs: Any):
        super().__init__(file_format=file_format, **kwargs)

    def text_info(self, description: str, homepage: str | None = None) -> tfds.core.DatasetInfo:
        """Returns the shared schema. Unshuffled, so that examples are read in the order of ids."""
        texts = {name: tfds.features.Text() for name in ("question", "answer", "solution")}
        return tfds.core.DatasetInfo(
            builder=self, description=description, homepage=homepage, disable_shuffling=True,
            features=tfds.features.FeaturesDict({"id": tfds.features.Scalar(np.int64), **texts}))


class Rows(Sequence):
    """A TFDS data source as dicts of str and int, each read once."""

    def __init__(self, source: Sequence[Mapping[str, Any]], place: Path) -> None:
        self._source, self.place = source, place
        self._known: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        if index not in self._known:
            with reading(self.place):
                row = self._source[int(index)]
                self._known[index] = {name: x.decode() if isinstance(x, bytes) else int(x)
                                      for name, x in row.items()}
        return self._known[index]


@contextlib.contextmanager
def reading(place: Path) -> Iterator[None]:
    """Raises ConfigError in place of whatever TFDS and array_record raise for damaged files."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of many types: files are parsed without further checks
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{place}: damaged or not of this version ({line[:120]}); delete that "
                          f"directory to prepare it anew") from error


def read(name: str, data: DataConfig, say: Callable[[str], None]) -> Rows:
    """Returns a split of the TFDS dataset `name`; the first use prepares it in `data.data_dir`.

    Several processes may do so at once: TFDS writes to a temporary directory and renames it.

    Raises:
      ConfigError: an unknown or empty split, damaged files, or a directory that cannot be written.
    """
    check(not data.path, "data.path", data.path, f"{name} reads no file; set data.name=jsonl")
    place = data_path(name, data)
    try:
        if not place.exists():
            prepare(make_builder(name, data), data, say)
    except (OSError, RuntimeError) as error:  # RuntimeError: array_record's for a full disk
        line = " ".join(str(error).split())
        raise ConfigError(f"data.data_dir = {data.data_dir!r}: {line}; "
                          "name a directory that can be written, with room") from error
    with reading(place):
        builder = make_builder(name, data)
        splits = dict(builder.info.splits.items())
        if not splits:
            raise ValueError("no splits")
        try:
            return Rows(builder.as_data_source(split=data.split), place)
        except ValueError as error:  # TFDS raises it for an unknown, malformed or empty split
            sizes = ", ".join(f"{x} ({info.num_examples})" for x, info in splits.items())
            raise ConfigError(
                f"data.split = {data.split!r}: no such examples; {builder.info.full_name} has "
                f"{sizes} and slices such as train[:50%]. To prepare it anew, with other files, "
                f"delete {place}") from error


def data_path(name: str, data: DataConfig) -> Path:
    """Returns the directory of a prepared dataset, which need not exist."""
    return data_dir(data) / name / str(OrderedTextBuilder.VERSION)


def data_dir(data: DataConfig) -> Path:
    """Returns the directory of all prepared datasets."""
    return local_path("data.data_dir", data.data_dir or DATA_DIR)


def make_builder(name: str, data: DataConfig) -> Any:
    """Returns the TFDS builder of a registered dataset."""
    return tfds.builder(name, data_dir=data_dir(data))


def prepare(builder: Any, data: DataConfig, say: Callable[[str], None]) -> None:
    """Writes the dataset's files unless they are there."""
    if builder.data_path.exists():
        return
    say(f"preparing {builder.info.full_name} in {builder.data_path}")
    config = tfds.download.DownloadConfig(manual_dir=data.manual_dir or None)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # hides TFDS's notices
            builder.download_and_prepare(download_config=config)
    except OSError:
        if not builder.data_path.exists():  # else another process was faster
            raise
