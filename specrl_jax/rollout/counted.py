"""What a rollout counted, summed for the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specrl_jax.structs import Counters, LaunchRecord

PER_LOOP = ("rounds", "draft_rounds", "draft_steps")  # every shard counts the loop's own


def totals(counters: Counters) -> dict[str, int]:
    """Returns sums over shards, and over drafters where there are several."""
    return {field.name: int(np.asarray(getattr(counters, field.name)).sum())
            for field in dataclasses.fields(counters)}


def by_drafter(counters: Counters, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Returns nodes drafted and accepted of each drafter, summed over shards."""
    return {name: {kind: int(getattr(counters, kind)[:, i].sum())
                   for kind in ("drafted", "accepted")} for i, name in enumerate(names)}


def record_of(before: Mapping[str, int], now: Mapping[str, int], shards: int, batch: int,
              seconds: float, last: bool) -> LaunchRecord:
    """Returns the record of a launch from `totals` before and after it."""
    names = {field.name for field in dataclasses.fields(LaunchRecord)} & set(now)
    counts: dict[str, Any] = {
        name: (now[name] - before.get(name, 0)) // (shards if name in PER_LOOP else 1)
        for name in names}
    return LaunchRecord(batch=batch, seconds=seconds, last=last, **counts)
