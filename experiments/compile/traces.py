"""Traces: how long responses are, and how often drafts are accepted."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax.config import check
from specrl_jax.metrics.run_files import read_metrics, read_samples
from specrl_jax.runtime.workdir import METRICS

RESULTS = Path(__file__).resolve().parents[1] / "results"
HEAD = "drafter_gsm8k_1600_cpu.json"


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a plan is predicted over."""

    name: str
    lengths: np.ndarray | None  # tokens of responses; None: a heavy tail up to the longest
    acceptance: tuple[float, ...]  # of a draft at depth 1, 2, ... if the one before was accepted

    def responses(self, count: int, most: int) -> np.ndarray:
        """Returns i32[count] lengths of at most `most` tokens, in the order of the sequences."""
        if self.lengths is None:
            return heavy_limits(count, most)
        drawn = np.random.default_rng(0).choice(self.lengths, count)
        return np.clip(drawn, 1, most).astype(np.int32)

    def accept_length(self, depth: int) -> float:
        """Returns the tokens that a round with a chain of `depth` drafts commits on average."""
        # Beyond the recorded depths, acceptance is that of the last.
        rates = [*self.acceptance, *self.acceptance[-1:] * max(depth - len(self.acceptance), 0)]
        return 1 + float(np.cumprod(rates[:depth]).sum())


def heavy_limits(rows: int, most: int) -> np.ndarray:
    """Returns heavy-tailed lengths i32[rows] that scale with `most`."""
    drawn = np.random.default_rng(0).exponential(60 / 256 * most, rows)
    return np.minimum(most, most // 16 + drawn.astype(int)).clip(1).astype(np.int32)


def repository() -> Trace:
    """Returns the repository's own: the heavy tail of its benchmarks, and the acceptance of an
    EAGLE head on held-out GSM8K answers at temperature 0.6."""
    held_out = json.loads((RESULTS / HEAD).read_text(encoding="utf-8"))["held_out"]
    last = held_out[max(held_out, key=int)]
    depths = sorted(name for name in last if name.startswith("match/"))
    return Trace(f"heavy-tailed lengths, {HEAD}", None, tuple(last[name] for name in depths))


def read(workdir: str) -> Trace:
    """Returns the lengths of a run's samples and the acceptance that its accept length shows; the
    repository's own for an empty path.

    Raises:
      ConfigError: there is no such run, or it has no steps.
    """
    if not workdir:
        return repository()
    run = Path(workdir)
    check((run / METRICS).is_file(), "--trace", workdir, "no run; name a run's directory")
    lengths = [len(sample["tokens"]) for sample in read_samples(run)
               if sample.get("learned", True)]
    rows = list(read_metrics(run))
    check(bool(lengths and rows), "--trace", workdir, "the run has no steps; name another")
    return Trace(workdir, np.asarray(lengths), (_rate(rows),))


def _rate(rows: list[Mapping[str, Any]]) -> float:
    """Returns the constant rate at which chains of the recorded depth commit what was committed."""
    drafted = [row for row in rows if row.get("control/drafting", 0) > 0]
    if not drafted:
        return 0.0
    share = np.mean([row["control/drafting"] for row in drafted])
    depth = np.mean([row["control/draft_depth"] for row in drafted]) / share
    gained = np.mean([row["rollout/accept_length"] - 1 for row in drafted]) / share
    rates = np.linspace(0, 1, 1001)
    committed = [sum(rate**i for i in range(1, max(round(depth), 1) + 1)) for rate in rates]
    return float(np.interp(gained, committed, rates))
