"""The metrics of a rollout, by the names of metrics/names.py."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from specrl_jax.metrics import launches
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.host_view import Reliability
from specrl_jax.structs import Metrics, Rollout
from specrl_jax.verify.registry import RULES


def rollout_metrics(rollout: Rollout, results: Sequence[Result],
                    plain_round_seconds: Mapping[int, float]) -> Metrics:
    """Returns the metrics of a step's rollouts, whose sequences are joined in `rollout`; for
    `plain_round_seconds` see `launches.saved`."""
    result = _merged(results)
    c = result.counters
    drafters = {f"draft/{name}/{kind}": count for name, counts in result.by_drafter.items()
                for kind, count in counts.items()}
    drafters |= {f"draft/{name}/{kind}_share": count / max(c[kind], 1)
                 for name, counts in result.by_drafter.items() for kind, count in counts.items()}
    return drafters | {
        "spec/lossy": float(not RULES.resolve(result.rule).lossless),
        "rollout/calibration_error": result.calibration.error,
        "rollout/reliability": reliability(result.calibration),
        "rollout/tokens": c["committed"],
        "rollout/tokens_per_second": c["committed"] / result.seconds,
        "rollout/accept_length": result.accept_length,
        "rollout/rounds": c["rounds"],
        "rollout/drafted": c["drafted"],
        "rollout/accepted": c["accepted"],
        "rollout/acceptance_rate": c["accepted"] / max(c["drafted"], 1),
        "rollout/packed": c["packed"],
        "rollout/clamped_rounds": c["clamped"],
        "rollout/nonfinite_drafts": c["broken"],
        "rollout/occupancy": c["row_rounds"] / max(c["slots"], 1),
        "rollout/launches": len(result.trace),
        "rollout/top_p_mass": _mean(rollout.top_p_mass, rollout.length),
        "rollout/logprob": _mean(rollout.raw_logprob, rollout.length),
        "response/length_mean": float(rollout.length.mean()),
        "response/length_max": int(rollout.length.max()),
        "response/clipped_fraction": float(1 - rollout.stopped.mean()),
        "time/rollout": result.seconds,
        "time/prefill": result.prefill_seconds,
        "rollout/batches": len(results),
    } | launches.summary(result.trace) | launches.saved(result.trace, plain_round_seconds)


def _merged(results: Sequence[Result]) -> Result:
    """Returns the account of several rollouts as one; its sequences are those of the last."""
    tried = np.stack([r.calibration.tried for r in results])
    share = tried / np.maximum(tried.sum(0), 1)
    nodes = tried.sum(1) / max(tried.sum(), 1)
    first = results[0]
    return results[0] if len(results) == 1 else dataclasses.replace(
        results[-1], counters=_summed([r.counters for r in results]),
        seconds=sum(r.seconds for r in results),
        prefill_seconds=sum(r.prefill_seconds for r in results),
        trace=[launch for r in results for launch in r.trace],
        by_drafter={name: _summed([r.by_drafter[name] for r in results])
                    for name in first.by_drafter},
        calibration=Reliability(
            tried.sum(0), *((share * np.stack([getattr(r.calibration, name) for r in results])
                             ).sum(0) for name in ("predicted", "accepted")),
            error=float(nodes @ [r.calibration.error for r in results])))


def _summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(one[name] for one in counts) for name in counts[0]}


def reliability(measured: Reliability) -> list[list[float]]:
    """Returns (drafts, mean estimate, accepted share) of each bin that is not empty."""
    lines = np.stack([measured.tried, measured.predicted, measured.accepted], 1)
    return [[float(f"{x:.6g}") for x in line] for line in lines[measured.tried > 0]]


def _mean(values: np.ndarray, length: np.ndarray) -> float:
    """Returns the mean over response tokens."""
    real = np.arange(values.shape[1])[None] < length[:, None]
    return float(values[real].mean())
