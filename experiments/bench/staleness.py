"""What the arms of experiments/staleness.py did, against the run without speculation."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specrl_jax.config import Config, ConfigError
from specrl_jax.evaluation.statistics import student
from specrl_jax.io.metrics import WALL_TIME, read_metrics, read_samples

TAIL = 0.25  # of the steps: the end of a run, or its beginning
DIGITS = 5  # significant ones
SMOOTH = 5  # steps that a drawn curve averages
PLAIN = "plain"
WATCHED = ("entropy", "unexplained")  # what only arms with a trigger measure
Account = dict[str, Any]
Cases = dict[str, dict[str, Account]]
"""Seed -> arm -> what it did."""


def account(workdir: Path, config: Config, plain: Account | None) -> Account:
    """An arm against the run without speculation, itself if there is none yet.

    Args:
      config: the arm's.

    Raises:
      ConfigError: a token differs, which the match rule and invariant numerics exclude.
    """
    rows = read_metrics(workdir)
    tokens = _digest(workdir)
    exact = config.spec.rule == "match" and config.model.numerics == "invariant"
    equal = plain is None or tokens == plain["tokens"]
    if exact and not equal:
        raise ConfigError(f"{workdir}: its tokens are not those of the run without speculation")

    def column(name: str) -> np.ndarray:
        return np.asarray([row.get(name, 0.0) for row in rows])

    took = column("time/rollout")
    base = took if plain is None else np.asarray(plain["rollout_seconds"])
    series = {
        "reward": column("reward/mean"), "seconds": column("time/step"), "rollout_seconds": took,
        "acceptance": (column("rollout/accept_length") - 1) / max(config.spec.depth, 1),
        "spent_seconds": column("time/distill"), "saved_seconds": base - took,
        "estimated_saved_seconds": column("time/saved"),
        "logprob": column("rollout/logprob"), "updates": column("distill/updates"),
        "length": column("response/length_mean")}
    series |= {name: column(f"distill/{name}") for name in WATCHED
               if any(f"distill/{name}" in row for row in rows)}
    return {"tokens": tokens, "tokens_equal": equal, "faults": int(column("drafter/faults")[-1]),
            "lossy": bool(column("spec/lossy").all()),
            "startup_seconds": float(column("time/startup").sum()),
            "peak_bytes": int(column("memory/peak_bytes").max()),
            **{name: _rounded(values) for name, values in series.items()}}


def wall_seconds(rows: list[dict[str, Any]], began: float, elapsed: float) -> float:
    """Seconds of a run's last start, and of the steps that it took over from earlier ones.

    What a kill threw away counts once: when it was done again.

    Args:
      rows: the lines of metrics.jsonl.
      began: Unix time of the start; elapsed: seconds since.
    """
    return elapsed + sum(row["time/step"] for row in rows if row[WALL_TIME] < began)


def _digest(workdir: Path) -> str:
    """Of all tokens of a run, in order."""
    said = [sample["tokens"] for sample in read_samples(workdir)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


# Over seeds.


def numbers(case: dict[str, Account]) -> dict[str, dict[str, float]]:
    """What is compared of each arm of one seed.

    "at equal seconds": as at the end, but when the arm that ended first did. "ahead": what all
    steps took less than those of the run without speculation. The account's "net" leaves out by how
    much late updates slow the policy update beside them.
    """
    plain = sum(case[PLAIN]["seconds"])
    budget = min(sum(arm["seconds"]) for arm in case.values())

    def of(arm: Account) -> dict[str, float]:
        steps = max(int((np.cumsum(arm["seconds"]) <= budget * (1 + 1e-9)).sum()), 1)
        spent, saved = sum(arm["spent_seconds"]), sum(arm["saved_seconds"])
        return {
            "acceptance_begin": _ends(arm["acceptance"], first=True),
            "acceptance_end": _ends(arm["acceptance"]),
            "acceptance_at_equal_seconds": _ends(arm["acceptance"][:steps]),
            "acceptance_mean": float(np.mean(arm["acceptance"])),
            "reward_end": _ends(arm["reward"]), "reward_mean": float(np.mean(arm["reward"])),
            "length_end": _ends(arm["length"]), "logprob_end": _ends(arm["logprob"]),
            "step_seconds": float(np.median(arm["seconds"])), "updates": sum(arm["updates"]),
            "spent_seconds": spent, "saved_seconds": saved, "net_seconds": saved - spent,
            "ahead_seconds": plain - sum(arm["seconds"]),
            "estimated_saved_seconds": sum(arm["estimated_saved_seconds"])} | {
            f"{key}_{end}": _ends(arm[key], first=end == "begin")
            for key in WATCHED if key in arm for end in ("begin", "end")}

    return {name: of(arm) for name, arm in case.items()}


def _ends(values: list[float], first: bool = False) -> float:
    """Mean over the last quarter of the steps, or the first."""
    part = max(int(TAIL * len(values)), 1)
    return float(np.mean(values[:part] if first else values[-part:]))


def summarize(cases: Cases, reference: str) -> dict[str, Any]:
    """Over seeds: [mean, low, high] of each arm's numbers, and of what they have more than the
    reference's, paired by seed; and how far its reward curve lies off the plain one.

    Intervals are Student's at 95 %; with one seed low and high are the value itself.
    """
    found = {seed: numbers(case) for seed, case in cases.items()}

    def over(values: list[float]) -> list[float]:
        low, high = student(values) if len(values) > 1 else (values[0], values[0])
        return [float(np.mean(values)), low, high]

    told = {}
    for name in dict.fromkeys(name for case in cases.values() for name in case):
        mine = [case[name] for case in found.values() if name in case]
        pairs = [(case[name], case[reference]) for case in found.values()
                 if name in case and reference in case]
        off = [float(np.mean(np.abs(np.subtract(case[name]["reward"], case[PLAIN]["reward"]))))
               for case in cases.values() if name in case]
        told[name] = {"seeds": len(mine), "reward_distance": over(off)} | {
            key: over([one[key] for one in mine]) for key in mine[0]}
        if pairs:
            told[name][f"over_{reference}"] = {
                key: over([a[key] - b[key] for a, b in pairs])
                for key in mine[0] if all(key in b for _, b in pairs)}
    return told


# The figure.


def acceptance(arm: Account, plain: Account) -> np.ndarray:
    return np.asarray(arm["acceptance"])


def reward(arm: Account, plain: Account) -> np.ndarray:
    return np.asarray(arm["reward"])


def reward_moved(arm: Account, plain: Account) -> np.ndarray:
    return reward(arm, plain) - reward(plain, plain)


def step_seconds(arm: Account, plain: Account) -> np.ndarray:
    return np.asarray(arm["seconds"])


def net_seconds(arm: Account, plain: Account) -> np.ndarray:
    return np.cumsum(np.subtract(arm["saved_seconds"], arm["spent_seconds"]))


def logprob(arm: Account, plain: Account) -> np.ndarray:
    return np.asarray(arm["logprob"])


Panel = tuple[str, Callable[[Account, Account], np.ndarray], bool]
"""Title, the curve of an arm, and whether it lies over seconds instead of steps."""
PANELS: tuple[Panel, ...] = (
    ("acceptance", acceptance, False), ("acceptance over wall-clock", acceptance, True),
    ("seconds of a step", step_seconds, False), ("seconds saved less spent", net_seconds, False))
BUG_PANELS: tuple[Panel, ...] = (
    ("reward", reward, False), ("reward less that without speculation", reward_moved, False),
    ("log-probability of a token, as told", logprob, False), ("acceptance", acceptance, False))


def draw(cases: Cases, path: Path, panels: tuple[Panel, ...] = PANELS) -> None:
    """Curves of the arms, running means over SMOOTH steps, with Student's intervals over seeds."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 2).reshape(-1)
    for ax, (title, curve, over_seconds) in zip(axes, panels, strict=True):
        for name in dict.fromkeys(name for case in cases.values() for name in case):
            arms = [case for case in cases.values() if name in case]
            seconds = np.mean([np.cumsum(case[name]["seconds"]) for case in arms], axis=0)
            values = np.stack([_smooth(curve(case[name], case[PLAIN])) for case in arms])
            _band(ax, seconds if over_seconds else np.arange(values.shape[1]), values, name)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xlabel("seconds" if over_seconds else "RL step")
        ax.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Means over the last SMOOTH steps, fewer at first."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - SMOOTH, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _band(ax: Axes, x: np.ndarray, values: np.ndarray, name: str) -> None:
    (line,) = ax.plot(x, values.mean(0), label=name)
    if len(values) > 1:
        low, high = np.asarray([student(column) for column in values.T]).T
        ax.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
