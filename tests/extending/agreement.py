"""A reward that wants the whole batch: how many other answers to the same question agree."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from specrl_jax.rewards.reward import batched


@batched
def agreement(prompts: Sequence[str], completions: Sequence[str],
              examples: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns, for each answer, the share of the answers to its question that are equal to it."""
    given = list(zip((x["id"] for x in examples), (x.strip() for x in completions), strict=True))
    asked, equal = collections.Counter(i for i, _ in given), collections.Counter(given)
    return [equal[answer] / asked[answer[0]] for answer in given]
