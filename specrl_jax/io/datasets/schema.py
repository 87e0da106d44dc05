"""What the builders have in common: features, file format and order."""

from typing import Any

import numpy as np
import tensorflow_datasets as tfds

FILE_FORMAT = "array_record"  # the only one that TFDS reads at random without TensorFlow


class OrderedTextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes array_record unless asked otherwise, and keeps the order of generation."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, file_format: Any = FILE_FORMAT, **kwargs: Any):
        super().__init__(file_format=file_format, **kwargs)

    def text_info(self, description: str, homepage: str | None = None) -> tfds.core.DatasetInfo:
        """The shared schema. Unshuffled, so that a reader's order is that of the ids."""
        return tfds.core.DatasetInfo(
            builder=self,
            description=description,
            homepage=homepage,
            disable_shuffling=True,
            features=tfds.features.FeaturesDict({
                "id": tfds.features.Scalar(np.int64),
                "question": tfds.features.Text(),
                "answer": tfds.features.Text(),
                "solution": tfds.features.Text(),
            }),
        )
