"""`reasoning_gym`: generated reasoning tasks, judged by the package that generates them (extra
`tasks`): https://github.com/open-thought/reasoning-gym."""

import ast
import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.structs import Json

try:
    factory: Any = importlib.import_module("reasoning_gym.factory")
except ImportError as error:
    raise ConfigError(f"data.name = 'reasoning_gym': {error}; install the extra by pip install "
                      "'specrl-jax[tasks]'") from error

EXAMPLES = 1000  # where data.examples is 0
MOST = 1_000_000  # examples of a split: one seed each
# Their own scoring runs an answer as Python, which no reward of this package does.
UNSAFE = ("binary_matrix", "countdown", "intermediate_integration", "n_queens",
          "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
          "string_insertion")


class Task(NamedTuple):
    """One task of a mixture."""

    text: str
    name: str
    weight: float
    options: Mapping[str, Any]


def load(data: DataConfig, say: Callable[[str], None]) -> list[Json]:
    """Returns the examples of the tasks in `data.task`, mixed in proportion to their weights.

    Each example is a function of the task, its options and one seed. No seed of the split `test` is
    one of `train`, or of another data.seed.

    Raises:
      ConfigError: an unknown task, option or split, or options that cannot work.
    """
    check(not data.path, "data.path", data.path, "reasoning_gym reads no file; leave it out")
    check(data.split in ("train", "test"), "data.split", data.split, "choose train or test")
    check(bool(data.task), "data.task", data.task, "name a task, such as chain_sum")
    tasks = [parse(text) for text in data.task]
    first = (2 * data.seed + (data.split == "test")) * MOST
    count, rows = min(data.examples or EXAMPLES, MOST), list[Json]()
    taken = [0] * len(tasks)
    for index in range(count):
        behind = [task.weight * (index + 1) - n * sum(t.weight for t in tasks)
                  for task, n in zip(tasks, taken, strict=True)]
        which = behind.index(max(behind))
        taken[which] += 1
        entry = generate(tasks[which].text, first + index)
        rows.append({"id": index, data.question_field: entry["question"],
                     data.answer_field: str(entry["answer"]), "task": tasks[which].text,
                     "task_seed": first + index})
    return rows


def parse(text: str) -> Task:
    """Returns the task that NAME[:WEIGHT][,OPTION=VALUE...] describes, such as
    "chain_sum:2,min_terms=2,max_terms=3". Raises ConfigError if there is no such task."""
    head, *options = re.split(r",\s*(?=\w+\s*=)", text)
    name, colon, weight = head.strip().partition(":")
    valid = re.fullmatch(r"\d*\.?\d+", weight) if colon else True
    check(bool(valid) and (not colon or float(weight) > 0), "data.task", text,
          "give NAME, NAME:WEIGHT or NAME:WEIGHT,OPTION=VALUE, as in chain_sum:2,min_terms=2")
    known = sorted(set(factory.DATASETS) - {"composite", *UNSAFE})
    check(name not in UNSAFE, "data.task", name,
          "its scoring runs answers as Python; choose another task")
    check(name in known, "data.task", name, f"choose one of {', '.join(known)}")
    values = dict(option.split("=", 1) for option in options)
    return Task(text, name, float(weight or 1), {
        key.strip(): _value(value.strip()) for key, value in values.items()})


def generate(text: str, seed: int) -> Json:
    """Returns the entry of a task and a seed. Raises ConfigError if its options cannot work."""
    try:
        return maker(text)(seed)[0]
    except Exception as error:  # tasks check their options by assertions and by errors of any type
        raise ConfigError(f"data.task = {text!r}: {' '.join(str(error).split())}; correct its "
                          "options") from error


@functools.cache
def maker(text: str) -> Callable[[int], Any]:
    """Returns a function from a seed to a dataset of one example of the task."""
    task = parse(text)
    return lambda seed: factory.create_dataset(task.name, seed=seed, size=1, **task.options)


def score(answer: str, task: str, seed: int) -> float:
    """Returns the task's own score of an answer, usually in 0..1."""
    dataset = maker(task)(seed)
    return float(dataset.score_answer(answer, dataset[0]))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
