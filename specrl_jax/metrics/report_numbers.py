"""The numbers of report.html: what speculation saved and cost, and sums and means over a run."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from specrl_jax.metrics.report_figures import COLORS, Rows, column


class Line(NamedTuple):
    """One line of the account."""

    what: str
    key: str  # the metric that is summed, if it is one
    seconds: float
    kind: str = ""  # "part": contained in the line above; "sum"; "cost": in no rollout


class Account(NamedTuple):
    """What speculation saved and cost in a run."""

    lines: list[Line]
    plain: float  # seconds of rollouts without drafts, predicted
    saved: float  # in seconds
    speedup: float  # of rollouts
    step_speedup: float  # of whole steps, NaN if their duration is not recorded
    error: float  # mean relative error of the predicted seconds, NaN if not recorded


PARTS = {"time/spent": "of it, for drafts and verifying them, predicted",
         "time/regret": "of it, lost in launches slower than plain ones (regret)"}
COSTS = {"time/distill": "training and checking the drafter",
         "time/profiling": "measuring what rounds cost, at start-up"}


def account(rows: Rows) -> Account | None:
    """Returns the sums over the steps that recorded `time/saved`; None if no step did."""
    rows = [row for row in rows if has([row], "time/saved")]
    rollout, saved, step = (total(rows, f"time/{name}") for name in ("rollout", "saved", "step"))
    if rollout <= 0 or rollout + saved <= 0:
        return None
    parts = [Line(what, key, total(rows, key), "part") for key, what in PARTS.items()
             if has(rows, key)]
    costs = [Line(what, key, -total(rows, key), "cost") for key, what in COSTS.items()
             if has(rows, key)]
    lines = [Line("rollouts without drafts, predicted", "", rollout + saved),
             Line("rollouts as they were", "time/rollout", rollout), *parts,
             Line("saved", "time/saved", saved, "sum"), *costs]
    if costs:
        net = saved + sum(cost.seconds for cost in costs)
        lines.append(Line("saved less costs", "", net, "sum"))
    plain_step = step + saved - total(rows, "time/distill")  # start-up is in no step
    return Account(lines, rollout + saved, saved, (rollout + saved) / rollout,
                   plain_step / step if step > 0 else np.nan, mean(rows, "time/cost_error"))


def drafts(rows: Rows) -> list[tuple[str, int, int]]:
    """Returns (drafter, tokens drafted, tokens accepted), all drafters first; [] without drafts."""
    names = sorted({key.split("/")[1] for row in rows for key in row
                    if key.startswith("draft/") and key.endswith("/drafted")})
    counted = [("all", "rollout"), *((name, f"draft/{name}") for name in names if len(names) > 1)]
    lines = [(name, int(total(rows, f"{of}/drafted")), int(total(rows, f"{of}/accepted")))
             for name, of in counted]
    return [line for line in lines if line[1] > 0]


def phases(rows: Rows) -> list[tuple[str, float, float]]:
    """Returns (phase, seconds, share of all steps), the rest as "other"; [] without `time/step`."""
    step = total(rows, "time/step")
    parts = [(name, total(rows, f"time/{name}")) for name in COLORS if has(rows, f"time/{name}")]
    parts.append(("other", max(step - sum(seconds for _, seconds in parts), 0.0)))
    return [(name, seconds, seconds / step) for name, seconds in parts if step > 0]


def finite(rows: Rows, key: str) -> np.ndarray:
    """Returns the finite values of a metric, f64[at most steps]."""
    values = column(rows, key)
    return values[np.isfinite(values)]


def has(rows: Rows, key: str) -> bool:
    """Returns whether any step has a finite value of the metric."""
    return len(finite(rows, key)) > 0


def total(rows: Rows, key: str) -> float:
    """Returns the sum of a metric over the steps."""
    return float(finite(rows, key).sum())


def mean(rows: Rows, key: str) -> float:
    """Returns the mean of a metric over the steps that have it, NaN if none has."""
    return float(finite(rows, key).mean()) if has(rows, key) else np.nan


def last(rows: Rows, key: str) -> float:
    """Returns the last finite value of a metric, NaN if there is none."""
    return next(reversed(finite(rows, key).tolist()), np.nan)


def highlights(rows: Rows) -> list[tuple[str, str]]:
    """Returns the few numbers at the top of the page: (what, value)."""
    spent, tenth, reward = account(rows), max(len(rows) // 10, 1), column(rows, "reward/mean")
    return [
        ("reward, first and last " + ("step" if tenth == 1 else f"{tenth} steps"),
         f"{np.mean(reward[:tenth]):.3f} → {np.mean(reward[-tenth:]):.3f}"),
        *_recorded(rows, [
            (f"best held-out accuracy, after step {last(rows, 'eval/best_step'):.0f}",
             "eval/accuracy", f"{max(finite(rows, 'eval/accuracy'), default=0):.3f}"),
            ("tokens/s of rollout", "rollout/tokens_per_second",
             f"{mean(rows, 'rollout/tokens_per_second'):.0f}"),
            ("accept length", "rollout/accept_length",
             f"{mean(rows, 'rollout/accept_length'):.2f}")]),
        *([("speed-up of rollouts, predicted", f"{spent.speedup:.2f}x")] if spent else [])]


def totals(rows: Rows, lengths: Mapping[int, int]) -> list[tuple[str, str]]:
    """Returns the numbers of the run as a whole, (what, value), given how many responses have each
    length."""
    return [
        ("steps", f"{len(rows)}"), ("sequences", f"{sum(lengths.values()):,}"),
        ("tokens", f"{sum(n * count for n, count in lengths.items()):,}"),
        *_recorded(rows, [
            ("time in steps", "time/step", f"{total(rows, 'time/step') / 60:.1f} min"),
            ("seconds of start-up", "time/startup", f"{total(rows, 'time/startup'):.0f}"),
            ("response length, mean", "response/length_mean",
             f"{mean(rows, 'response/length_mean'):.1f}"),
            ("faults of the drafter", "drafter/faults", f"{last(rows, 'drafter/faults'):.0f}"),
            ("compilations, last step", "compilations", f"{last(rows, 'compilations'):.0f}")])]


def _recorded(rows: Rows, lines: list[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Returns (what, value) of those lines (what, metric, value) whose metric the run recorded."""
    return [(what, value) for what, key, value in lines if has(rows, key)]
