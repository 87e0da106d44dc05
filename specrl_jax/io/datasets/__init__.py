"""TFDS builders. Importing this package registers them: `tfds.builder("specrl_arithmetic/add2")`.

Both builders write array_record files, which are read without TensorFlow, and share one schema:

  id        int64, unique in a dataset over all its splits
  question  text, the user's message
  answer    text, the final number, without commas or units
  solution  text, worked steps that end with a line "#### answer"
"""

from specrl_jax.io.datasets.arithmetic import SpecrlArithmetic
from specrl_jax.io.datasets.gsm8k import SpecrlGsm8k

__all__ = ["SpecrlArithmetic", "SpecrlGsm8k"]
