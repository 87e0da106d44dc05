"""Prompts: the examples of a dataset, and which of them each step uses."""

import ast
import collections
import dataclasses
import datetime
import hashlib
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.io.chats import conversation
from specrl_jax.io.datasets import DATASETS

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
        found = {"id": example_id}
        where = f"example {example_id} of {self.data.path or self.data.name}"
        for name in ("question", "answer"):
            field = getattr(self.data, f"{name}_field")
            check(field in row, f"data.{name}_field", field,
                  f"{where} has no such field; it has {', '.join(row)}")
            value = row[field]
            if name == "question" and isinstance(value, list):
                found[name] = _asked(value, where)
                continue
            check(not isinstance(value, NoneType | Mapping | list), f"data.{name}_field", field,
                  f"{where} has {_json(value)} there; give a text or a number")
            found[name] = str(value)
        return {**row, **found}


def _json(value: Any) -> str:
    return "null" if value is None else reprlib.repr(value)


def _asked(chat: list[Any], where: str) -> list[dict[str, str]]:
    """Returns a conversation that awaits an answer."""
    found = conversation(chat, "data.question_field", where)
    check(bool(found) and found[-1]["role"] == "user", "data.question_field", where,
          "a prompt's messages must end with the user's")
    return found


def digest(examples: Sequence[Example]) -> str:
    """Returns a hash of all examples in their order, for which only JSON values count."""
    known = hashlib.blake2b(digest_size=16)
    for index in range(len(examples)):
        for name, value in sorted(examples[index].items()):
            try:
                text = json.dumps([name, value], sort_keys=True)
            except (TypeError, ValueError):  # an object of a dataset's own
                continue
            known.update(f"{text}\n".encode())
    return known.hexdigest()


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


def step_prompts(num_examples: int, seed: int, step: int, prompts_per_step: int) -> np.ndarray:
    """Returns the indices of the examples that `step` uses, i64[prompts_per_step]."""
    return prompts_from(num_examples, seed, step * prompts_per_step, prompts_per_step)


def prompts_from(num_examples: int, seed: int, first: int, count: int) -> np.ndarray:
    """Returns the indices of `count` examples after the first `first` ones of all epochs.

    Each epoch is a permutation of all examples, keyed by (seed, epoch). A step may span the end of
    an epoch; only there can a prompt occur twice in a step. NumPy guarantees the raw words of
    Philox across versions, but not the results of its shuffles.
    """
    epochs, offsets = np.divmod(np.arange(first, first + count), num_examples)
    orders = {epoch: np.argsort(np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(
        num_examples), kind="stable") for epoch in np.unique(epochs)}
    return np.array([orders[e][i] for e, i in zip(epochs, offsets, strict=True)], np.int64)


def occurrences(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns how often each id occurred earlier in `ids`, i32[len(ids)]."""
    seen: collections.Counter[int] = collections.Counter()
    result = np.zeros(len(ids), np.int32)
    for index, prompt_id in enumerate(int(x) for x in ids):
        result[index] = seen[prompt_id]
        seen[prompt_id] += 1
    return result


def template_variables(data: DataConfig) -> dict[str, Any]:
    """Returns the variables that `data` gives to the chat template besides the conversation."""
    given = {name: _value(text) for name, _, text in (x.partition("=") for x in data.template)}
    if data.date:
        given["strftime_now"] = datetime.date.fromisoformat(data.date).strftime
    return given


def _value(text: str) -> Any:
    """Returns the Python or JSON value that a text spells, or the text."""
    words = {"true": True, "false": False, "null": None}
    try:
        return words[text] if text in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def messages(example: Example, system: str = "") -> list[dict[str, str]]:
    """Returns the conversation for the chat template; an empty `system`, or one of its own, adds
    no message."""
    asked = example["question"]
    chat = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    if system and chat[0]["role"] != "system":
        chat = [{"role": "system", "content": system}, *chat]
    return chat
