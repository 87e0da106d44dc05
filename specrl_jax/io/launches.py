"""What the controller chose in each launch of a rollout, what it was to take, and what it took.

Names under `time/` hold measured seconds; those under `control/` follow from the table of costs,
with what rollouts taught of it, and the tokens alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CHOSEN = ("batch", "live", "context", "steps", "branch", "nodes", "width", "drafting", "switches",
          "tokens", "predicted_tokens", "predicted_seconds", "spent_seconds", "off_seconds",
          "fixed_seconds", "fixed_steps", "launch_rounds", "lag", "trial")
AUDITED = ("seconds", "audit_off_seconds", "audit_off_tokens", "audit_fixed_seconds",
           "audit_fixed_tokens")
MOST = 512  # launches of a step that are recorded one by one
DIGITS = 6  # significant ones
LAUNCHES, MEASURED = "control/launches", "time/launches"


def summary(trace: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Metrics of one rollout; {} where the controller explains nothing.

    `time/saved` is what the same tokens were to take without a draft less what they took,
    `time/spent` what drafts and verifying them were to take beyond plain rounds, by the corrected
    tables, and `time/regret` what was lost against the better of plain decoding and the best
    constant depth, launch by launch; in a trial the latter is by the prices that it takes.
    """
    if not trace or "predicted_seconds" not in trace[0]:
        return {}
    total = {name: float(sum(t[name] for t in trace)) for name in (*CHOSEN, "seconds")}
    rounds = max(total["launch_rounds"], 1.0)
    errors = [abs(t["predicted_seconds"] / t["seconds"] - 1) * t["seconds"] for t in trace]
    return {
        "control/draft_depth": _mean(trace, "steps", rounds),
        "control/verify_tokens": _mean(trace, "width", rounds),
        "control/drafting": _mean(trace, "drafting", rounds),
        "control/switches": total["switches"],
        "control/predicted_seconds": total["predicted_seconds"],
        "control/plain_seconds": total["off_seconds"],
        "control/fixed_seconds": total["fixed_seconds"],
        "time/control_error": sum(errors) / total["seconds"],
        "time/saved": total["off_seconds"] - total["seconds"],
        "time/spent": total["spent_seconds"],
        "time/regret": sum(max(0.0, t["seconds"] - min(t["off_seconds"], t["fixed_seconds"]))
                           for t in trace),
        LAUNCHES: [_rounded(t, CHOSEN) for t in trace[:MOST]],
        MEASURED: [_rounded(t, AUDITED) for t in trace[:MOST]]}


def saved(trace: Sequence[Mapping[str, Any]], plain: Mapping[int, float], shards: int
          ) -> dict[str, float]:
    """`time/saved` by a start-up measure, for controllers that explain nothing; {} without it.

    A launch's tokens were to take as many plain rounds as its live rows would have needed.

    Args:
      trace: of a rollout; its counters are sums over shards since the rollout began.
      plain: seconds of a round without a draft, by batch size of a shard.
    """
    if not trace or not plain:
        return {}
    total, before = 0.0, {"committed": 0, "row_rounds": 0, "rounds": 0}
    for launch in trace:
        tokens, rows, rounds = (launch[name] - before[name] for name in before)
        live = rows * shards / max(rounds, 1)  # every shard counts its rounds
        total += plain[launch["batch"]] * tokens / max(live, 1)
        before = {name: launch[name] for name in before}
    return {"time/saved": total - sum(launch["seconds"] for launch in trace)}


def _mean(trace: Sequence[Mapping[str, Any]], name: str, rounds: float) -> float:
    """Over rounds."""
    return float(sum(t[name] * t["launch_rounds"] for t in trace) / rounds)


def _rounded(launch: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    return {name: float(f"{launch[name]:.{DIGITS}g}") for name in names if name in launch}


def recorded(row: Mapping[str, Any]) -> list[dict[str, float]]:
    """The launches of one line of metrics.jsonl, what was chosen and what was measured together."""
    return [chosen | measured for chosen, measured in zip(
        row.get(LAUNCHES, []), row.get(MEASURED, []), strict=True)]
