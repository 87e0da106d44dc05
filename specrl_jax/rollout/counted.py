"""Sums of what a rollout counted, for the host."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specrl_jax.structs import Counters


def totals(counters: Counters) -> dict[str, int]:
    """Returns sums over shards, and over drafters where there are several."""
    return {field.name: int(np.asarray(getattr(counters, field.name)).sum())
            for field in dataclasses.fields(counters)}


def by_drafter(counters: Counters, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Returns nodes drafted and accepted of each drafter, summed over shards."""
    return {name: {kind: int(getattr(counters, kind)[:, i].sum())
                   for kind in ("drafted", "accepted")} for i, name in enumerate(names)}
