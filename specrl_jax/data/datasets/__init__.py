"""Datasets by the names that `data.name` takes.

A dataset is a function of (data: DataConfig, say) that returns a sequence of dicts, each with the
fields that `data.question_field` and `data.answer_field` name, and perhaps an int "id" that no
other example has; its index is used where there is none. `say` prints a line for the user. A
reward gets the whole dict as its example.

    def riddles(data, say):
        return [{"question": "What has 4 legs at dawn?", "answer": "man"}]

`data.name=package.module:riddles` uses it without any registration.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specrl_jax.config import DataConfig, Registry

Dataset = Callable[[DataConfig, Callable[[str], None]], Sequence[Mapping[str, Any]]]
DATASETS: Registry[Dataset] = Registry("data.name", Callable)

DATASETS.register("specrl_arithmetic")("specrl_jax.data.datasets.arithmetic:load")
DATASETS.register("gsm8k")("specrl_jax.data.datasets.gsm8k:load")
DATASETS.register("jsonl")("specrl_jax.data.datasets.jsonl:load")
DATASETS.register("hf")("specrl_jax.data.datasets.huggingface:load")
DATASETS.register("reasoning_gym")("specrl_jax.data.datasets.reasoning:load")
