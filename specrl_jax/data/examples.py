"""Prompts: the examples of a dataset, and which of them each step uses."""

import dataclasses
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.data.chats import conversation
from specrl_jax.data.datasets import DATASETS
from specrl_jax.runtime.digest import digest

Example = Mapping[str, Any]
"""id: int; question: str, or a list of chat messages; answer: str; and the dataset's own fields."""


@dataclasses.dataclass(frozen=True)
class Examples(Sequence):
    """The first `count` examples of a dataset, each with "id", "question" and "answer"."""

    data: DataConfig
    source: Sequence[Mapping[str, Any]]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Example:
        if not 0 <= index < self.count:
            raise IndexError(f"example {index} of {self.data.name}, which has {self.count}")
        row = self.source[int(index)]
        check(isinstance(row, Mapping), "data.name", self.data.name,
              f"example {index} is a {type(row).__name__}; give dicts")
        example_id = row.get("id", int(index))
        good = isinstance(example_id, int | np.integer) and 0 <= int(example_id) < 2**31
        check(good, "data.name", self.data.name,
              f"example {index} has the id {example_id!r}; give a number in int32")
        fields = {"id": example_id}
        where = f"example {example_id} of {self.data.path or self.data.name}"
        for name in ("question", "answer"):
            field = getattr(self.data, f"{name}_field")
            check(field in row, f"data.{name}_field", field,
                  f"{where} has no such field; it has {', '.join(row)}")
            value = row[field]
            if name == "question" and isinstance(value, list):
                fields[name] = _asked(value, where)
                continue
            check(not isinstance(value, NoneType | Mapping | list), f"data.{name}_field", field,
                  f"{where} has {reprlib.repr(value)} there; give a text or a number")
            fields[name] = str(value)
        return {**row, **fields}


def _asked(chat: list[Any], where: str) -> list[dict[str, str]]:
    """Returns a conversation that awaits an answer."""
    turns = conversation(chat, "data.question_field", where)
    check(bool(turns) and turns[-1]["role"] == "user", "data.question_field", where,
          "a prompt's messages must end with the user's")
    return turns


def examples_digest(examples: Sequence[Example]) -> str:
    """Returns a hash of all examples in their order, for which only JSON values count."""
    fields = (field for i in range(len(examples)) for field in sorted(examples[i].items()))
    return digest(text for field in fields if (text := _encoded(field)))


def _encoded(field: tuple[str, Any]) -> bytes:
    """Returns a field as JSON; nothing of an object of a dataset's own."""
    try:
        return json.dumps(field, sort_keys=True).encode()
    except (TypeError, ValueError):
        return b""


def load_examples(data: DataConfig, say: Callable[[str], None] = print) -> Examples:
    """Returns the examples that `data` selects; `say` gets a line if they must be prepared first.
    Raises ConfigError if the dataset is unknown or empty, or as its `load` does; that of a user's
    own may raise anything."""
    load = DATASETS.resolve(data.name)
    try:
        source = load(data, say)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if ":" not in data.name:
            raise
        raise ConfigError(f"data.name = {data.name!r}: {type(error).__name__}: "
                          f"{' '.join(str(error).split())}") from error
    check(hasattr(source, "__len__") and hasattr(source, "__getitem__"), "data.name", data.name,
          f"returned a {type(source).__name__}; return a sequence of dicts")
    check(len(source) > 0, "data.name", data.name, "the dataset has no examples")
    return Examples(data, source, min(data.examples or len(source), len(source)))
