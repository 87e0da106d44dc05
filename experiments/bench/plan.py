"""Seconds of the controller's own parts next to whole rounds."""

import statistics
from typing import Any

import jax
import numpy as np
from rich.table import Table

from . import parts, tables
from .arms import Arm
from .timing import alternate, seconds_of, spread

CALLS = 50  # of each part, beside each rollout


def measure(arm: Arm, repeats: int, say: Any) -> dict[str, Any]:
    """Seconds of a round and of the parts, once a repeat, and the parts' shares of the round."""
    engine, runs = arm.sampler.engine, []
    at = parts.situation(arm, arm.run(None).result)
    called = parts.control_parts(engine.decoder, jax.tree.map(np.asarray, engine.control), at)
    for part in called.values():
        jax.block_until_ready(part())

    def rollout() -> float:
        runs.append(arm.run(None))
        return runs[-1].round_seconds

    def of(part: parts.Part) -> float:
        return statistics.median(
            seconds_of(part, jax.block_until_ready) for _ in range(CALLS))

    tasks = {"round": rollout} | {name: (lambda part=part: of(part))
                                  for name, part in called.items()}
    seconds = alternate(tasks, repeats, say)
    seconds["plan + keep"] = [a + b for a, b in zip(seconds["plan"], seconds["keep"], strict=True)]
    share = {name: spread([a / b for a, b in zip(values, seconds["round"], strict=True)])
             for name, values in seconds.items() if name != "round"}
    return {"rows": at.rows, "seconds": {name: spread(v) for name, v in seconds.items()},
            "share": share, "buckets": [list(b) for b in parts.buckets(engine.decoder, at)],
            "compilations": sum(run.compilations for run in runs)}


def table(found: dict[str, Any]) -> Table:
    """Microseconds and shares."""
    shown = Table("part", "microseconds", "% of a round", caption="median (range)",
                  title=f"{found['rows']} rows, {len(found['buckets'])} buckets")
    for name, seconds in found["seconds"].items():
        share = tables.between(found["share"][name], 100, 2) if name in found["share"] else ""
        shown.add_row(name, tables.between(seconds, 1e6), share)
    return shown
