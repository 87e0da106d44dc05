"""`specrl_arithmetic`: generated arithmetic, one TFDS builder config for each level."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow_datasets as tfds

from specrl_jax.config import DataConfig, check
from specrl_jax.data.datasets.levels import LEVELS, Level, Problem, problems
from specrl_jax.data.datasets.tfds_text import OrderedTextBuilder, Rows, read


def load(data: DataConfig, say: Callable[[str], None]) -> Rows:
    """Returns the problems of `data.level`. Raises ConfigError if the level is unknown, or as
    `tfds_text.read` does."""
    levels = [level.name for level in LEVELS]
    check(data.level in levels, "data.level", data.level, f"choose one of {', '.join(levels)}")
    return read(f"specrl_arithmetic/{data.level}", data, say)


@dataclasses.dataclass
class LevelConfig(tfds.core.BuilderConfig):
    """A level as a TFDS builder config."""

    level: Level = LEVELS[0]


class SpecrlArithmetic(OrderedTextBuilder):
    """Splits `train` and `test` (about one in ten) share no problem; nothing is downloaded."""

    RELEASE_NOTES = {"1.0.0": "First release."}
    BUILDER_CONFIGS = [LevelConfig(name=x.name, description=x.help, level=x) for x in LEVELS]

    builder_config: LevelConfig

    def _info(self) -> tfds.core.DatasetInfo:
        return self.text_info(f"Arithmetic problems: {self.builder_config.description}.")

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        numbered = list(enumerate(problems(self.builder_config.level)))
        return {split: self._generate_examples([x for x in numbered if x[1].is_test == is_test])
                for split, is_test in (("train", False), ("test", True))}

    def _generate_examples(self, numbered: Iterable[tuple[int, Problem]]
                           ) -> Iterator[tuple[int, dict[str, Any]]]:
        for id, problem in numbered:
            yield id, {"id": id, "question": problem.question, "answer": str(problem.answer),
                       "solution": problem.solution}
