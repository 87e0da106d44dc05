"""The reward `latex`. A module of its own, because math-verify imports SymPy, which is slow."""

import functools
import logging
from typing import Any

import math_verify

from specrl_jax.data.examples import Example

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
NO_LIMIT: Any = None  # judge.of_config has one; math-verify's own works in main threads only


def latex(prompt: str, completion: str, example: Example) -> float:
    """Returns 1 if math-verify finds the completion's final expression equal to the answer.

    Some expressions take SymPy hours or more memory than there is: `judge.of_config` runs this in
    processes with limits, where such a completion is wrong.

    Raises:
      ValueError: math-verify cannot read the answer.
    """
    parse = functools.partial(math_verify.parse, parsing_timeout=NO_LIMIT)
    gold = parse(f"\\boxed{{{example['answer']}}}")
    if not gold:
        raise ValueError(f"math-verify cannot read the answer {example['answer']!r}")
    return float(math_verify.verify(gold, parse(completion), timeout_seconds=NO_LIMIT))
