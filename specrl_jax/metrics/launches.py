"""Metrics of the launches of a rollout: what was chosen, what that was to cost, what it cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from specrl_jax.structs import LaunchRecord, Metrics

MOST = 512  # launches of a step that are recorded one by one
LAUNCHES, MEASURED = "control/launches", "time/launches"


def summary(trace: Sequence[LaunchRecord]) -> Metrics:
    """Returns the metrics of one rollout; {} if it drafted nothing and predicted nothing.

    `time/saved` is the predicted seconds of the same tokens in plain rounds less what they took,
    `time/spent` those of drafts and their verification beyond plain rounds, and `time/regret` the
    seconds lost against plain rounds, launch by launch.
    """
    if not any(t.control or t.draft_rounds for t in trace):
        return {}
    rounds = max(sum(t.rounds for t in trace), 1)
    metrics: Metrics = {
        "control/draft_depth": sum(t.draft_depth for t in trace) / rounds,
        "control/verify_tokens": sum(t.packed for t in trace) / rounds,
        "control/drafting": sum(t.draft_rounds for t in trace) / rounds,
        LAUNCHES: [chosen(t) for t in trace[:MOST]],
        MEASURED: [{"seconds": _short(t.seconds)} for t in trace[:MOST]]}
    metrics |= {f"control/{name}": sum(t.control.get(name, 0.0) for t in trace)
              for name in trace[0].control}
    if all("predicted_seconds" in t.control for t in trace):
        took = sum(t.seconds for t in trace)
        lost = [t.seconds - t.control["plain_seconds"] for t in trace]
        metrics |= {
            "time/cost_error": sum(abs(t.control["predicted_seconds"] - t.seconds)
                                   for t in trace) / took,
            "time/saved": -sum(lost), "time/regret": sum(max(0.0, s) for s in lost),
            "time/spent": metrics["control/speculation_seconds"]}
    return metrics


def saved(trace: Sequence[LaunchRecord], plain: Mapping[int, float]) -> dict[str, float]:
    """Returns `time/saved` for controllers that predict nothing, from the seconds of a plain round
    by batch size: tokens were to cost as many plain rounds as the live rows would have needed."""
    if not plain or not trace or "plain_seconds" in trace[0].control:
        return {}
    return {"time/saved": sum(plain[t.batch] * t.rounds * t.committed / max(t.row_rounds, 1)
                              - t.seconds for t in trace)}


def chosen(launch: LaunchRecord) -> dict[str, float]:
    """Returns what one launch ran, means over its rounds, and what its controller reports."""
    rounds = max(launch.rounds, 1)
    values = {"batch": launch.batch, "rounds": launch.rounds, "tokens": launch.committed,
             "live": launch.row_rounds / rounds, "draft_depth": launch.draft_depth / rounds,
             "drafting": launch.draft_rounds / rounds, "verify_tokens": launch.packed / rounds,
             "drafts": launch.drafted / max(launch.row_rounds, 1), **launch.control}
    return {name: _short(value) for name, value in values.items()}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def recorded(row: Mapping[str, Any]) -> list[dict[str, float]]:
    """Returns the launches of one line of metrics.jsonl, choices and seconds together."""
    chose, took = row.get(LAUNCHES), row.get(MEASURED)
    if not isinstance(chose, list) or not isinstance(took, list):
        return []
    return [of | measured for of, measured in zip(chose, took, strict=False)
            if isinstance(of, dict) and isinstance(measured, dict)]
