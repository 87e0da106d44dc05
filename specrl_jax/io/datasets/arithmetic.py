"""`specrl_arithmetic`: generated arithmetic, one builder config a level of difficulty."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow_datasets as tfds

from specrl_jax.io.datasets.levels import LEVELS, Level, Problem, problems
from specrl_jax.io.datasets.schema import OrderedTextBuilder


@dataclasses.dataclass
class LevelConfig(tfds.core.BuilderConfig):
    """A level as TFDS wants it."""

    level: Level = LEVELS[0]


class SpecrlArithmetic(OrderedTextBuilder):
    """Splits `train` and `test` (about one in ten) share no problem; nothing is downloaded."""

    RELEASE_NOTES = {"1.0.0": "First release."}
    BUILDER_CONFIGS = [LevelConfig(name=x.name, description=x.help, level=x) for x in LEVELS]

    def _info(self) -> tfds.core.DatasetInfo:
        return self.text_info(f"Arithmetic problems: {self.builder_config.description}.")

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        numbered = list(enumerate(problems(self.builder_config.level)))
        return {
            "train": self._generate_examples(x for x in numbered if not x[1].is_test),
            "test": self._generate_examples(x for x in numbered if x[1].is_test),
        }

    def _generate_examples(
        self, numbered: Iterable[tuple[int, Problem]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for id, problem in numbered:
            yield id, {
                "id": id,
                "question": problem.question,
                "answer": str(problem.answer),
                "solution": problem.solution,
            }
