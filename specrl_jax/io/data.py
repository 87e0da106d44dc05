"""Prompts: which dataset, which examples in which step, and how they are asked.

Datasets are prepared by TFDS and read as data sources, at random and without TensorFlow.
"""

import collections
import contextlib
import dataclasses
import io
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.io.datasets.levels import LEVELS

Example = Mapping[str, Any]  # id: int; question, answer, solution: str

TFDS_NAMES = types.MappingProxyType({
    "specrl_arithmetic": "specrl_arithmetic/{level}",
    "gsm8k": "specrl_gsm8k",
})


@dataclasses.dataclass(frozen=True)
class Examples(Sequence):
    """The first `count` examples of a TFDS data source, in the order of their ids."""

    name: str
    source: Sequence[Mapping[str, Any]]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.count:
            raise IndexError(f"example {index} of {self.name}, which has {self.count}")
        row = self.source[int(index)]
        return {name: x.decode() if isinstance(x, bytes) else int(x) for name, x in row.items()}


def load_examples(data: DataConfig, say: Callable[[str], None] = print) -> Examples:
    """The examples that `data` asks for; the first use prepares them below `data.data_dir`.

    Several processes may do so at once: TFDS writes to a temporary directory and renames it. The
    prepared files are used from then on, whatever happens to those they were made from.

    Args:
      say: is told, in a line, when data is being prepared.

    Raises:
      ConfigError: an unknown dataset, level or split, no examples, files that are missing or
        damaged, or a directory that cannot be written.
    """
    check(data.name in TFDS_NAMES, "data.name", data.name, f"choose one of {', '.join(TFDS_NAMES)}")
    levels = [level.name for level in LEVELS]
    check(data.level in levels, "data.level", data.level, f"choose one of {', '.join(levels)}")
    try:
        _prepare(_builder(data), data, say)
        builder = _builder(data)
    except OSError as error:
        raise ConfigError(f"data.data_dir = {data.data_dir!r}: {error}; "
                          "name a directory that can be written") from error
    source = _source(builder, data)
    count = min(data.examples or len(source), len(source))
    return Examples(f"{builder.info.full_name} {data.split}", source, count)


def step_prompts(num_examples: int, seed: int, step: int, prompts_per_step: int) -> np.ndarray:
    """i64[prompts_per_step], indices of the examples that `step` uses: a pure function.

    Each epoch is a permutation of all examples, keyed by (seed, epoch); steps read on across its
    end, which is the only place where a prompt may occur twice in a step. Philox's raw words are
    fixed by NumPy's compatibility policy, which its shuffling is not.
    """
    positions = np.arange(step * prompts_per_step, (step + 1) * prompts_per_step)
    epochs, places = np.divmod(positions, num_examples)
    orders = {epoch: _permutation(num_examples, seed, epoch) for epoch in np.unique(epochs)}
    return np.array([orders[e][i] for e, i in zip(epochs, places, strict=True)], np.int64)


def occurrences(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """i32[len(ids)]: how often each id occurred before, in the order given."""
    seen: collections.Counter[int] = collections.Counter()
    result = np.zeros(len(ids), np.int32)
    for place, id in enumerate(int(x) for x in ids):
        result[place] = seen[id]
        seen[id] += 1
    return result


def messages(example: Example, system: str = "") -> list[dict[str, str]]:
    """The conversation that a chat template renders; an empty `system` leaves no message."""
    user = {"role": "user", "content": example["question"]}
    return [{"role": "system", "content": system}, user] if system else [user]


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    return np.argsort(words, kind="stable")


def _builder(data: DataConfig) -> Any:
    import tensorflow_datasets as tfds  # 0.3 s that commands without data need not pay

    import specrl_jax.io.datasets  # noqa: F401, registers the builders

    name = TFDS_NAMES[data.name].format(level=data.level)
    return tfds.builder(name, data_dir=data.data_dir or None)


def _prepare(builder: Any, data: DataConfig, say: Callable[[str], None]) -> None:
    if builder.data_path.exists():
        return
    import tensorflow_datasets as tfds

    if data.name == "gsm8k" and data.manual_dir:
        _check_manual_dir(data.manual_dir)
    say(f"preparing {builder.info.full_name} in {builder.data_path}")
    config = tfds.download.DownloadConfig(manual_dir=data.manual_dir or None)
    try:
        with _quiet():
            builder.download_and_prepare(download_config=config)
    except OSError:
        if not builder.data_path.exists():  # else another process was faster
            raise


def _check_manual_dir(directory: str) -> None:
    from specrl_jax.io.datasets.gsm8k import HOW_TO_GET, find_files

    check(bool(find_files(directory)), "data.manual_dir", directory, f"no files; {HOW_TO_GET}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without TFDS's progress bars and its notices on standard output."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _source(builder: Any, data: DataConfig) -> Sequence[Mapping[str, Any]]:
    try:
        return builder.as_data_source(split=data.split)
    except ValueError as error:  # TFDS's answer to an unknown, malformed or empty split
        sizes = ", ".join(f"{x} ({info.num_examples})" for x, info in builder.info.splits.items())
        raise ConfigError(
            f"data.split = {data.split!r}: no such examples; {builder.info.full_name} has {sizes} "
            f"and slices such as train[:50%]. To prepare it anew, with other files, delete "
            f"{builder.data_path}") from error
