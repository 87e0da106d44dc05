"""What the arms of experiments/staleness.py did, against the run without speculation."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specrl_jax.config import Config, ConfigError
from specrl_jax.host.metrics import read_metrics, read_samples
from specrl_jax.intervals import bootstrap

TAIL = 0.25  # of the steps: the end of a run, or its beginning


def account(workdir: Path, plain: Path, config: Config) -> dict[str, Any]:
    """An arm against the run without speculation.

    Raises:
      ConfigError: a token differs, which the match rule and invariant numerics exclude.
    """
    rows, base = read_metrics(workdir), read_metrics(plain)
    exact = config.spec.rule == "match" and config.model.numerics == "invariant"
    equal = _tokens(workdir) == _tokens(plain)
    if exact and not equal:
        raise ConfigError(f"{workdir}: its tokens are not those of {plain}")

    def column(name: str, of: list[dict[str, Any]] = rows) -> np.ndarray:
        return np.asarray([row.get(name, 0.0) for row in of])

    saved = column("time/rollout", base) - column("time/rollout")
    return {
        "tokens_equal": equal, "reward": column("reward/mean").tolist(),
        "acceptance": ((column("rollout/accept_length") - 1) / config.spec.steps).tolist(),
        "seconds": column("time/step").tolist(), "rollout_seconds": column("time/rollout").tolist(),
        "spent_seconds": column("time/distill").tolist(), "saved_seconds": saved.tolist(),
        "logprob": column("rollout/logprob").tolist(),
        "updates": column("distill/updates").tolist(),
        "unexplained": column("distill/unexplained").tolist(),
        "entropy": column("distill/entropy").tolist(), "faults": int(column("drafter/faults")[-1]),
    }


def _tokens(workdir: Path) -> list[list[int]]:
    return [sample["tokens"] for sample in read_samples(workdir)]


def summarize(cases: dict[str, Any]) -> dict[str, Any]:
    """Over seeds: mean and 95 % interval of each arm; the interval is empty with one seed."""
    arms = next(iter(cases.values()))

    def over(values: list[float]) -> list[float]:
        low, high = bootstrap(values) if len(values) > 1 else (values[0], values[0])
        return [float(np.mean(values)), low, high]

    def ends(arm: dict[str, Any], name: str, last: bool) -> float:
        part = max(int(TAIL * len(arm[name])), 1)
        return float(np.mean(arm[name][-part:] if last else arm[name][:part]))

    return {name: {
        "acceptance_begin": over([ends(c[name], "acceptance", False) for c in cases.values()]),
        "acceptance_end": over([ends(c[name], "acceptance", True) for c in cases.values()]),
        "step_seconds": over([float(np.median(c[name]["seconds"])) for c in cases.values()]),
        "spent_seconds": over([sum(c[name]["spent_seconds"]) for c in cases.values()]),
        "saved_seconds": over([sum(c[name]["saved_seconds"]) for c in cases.values()]),
        "net_seconds": over([sum(c[name]["saved_seconds"]) - sum(c[name]["spent_seconds"])
                             for c in cases.values()]),
    } for name in arms}


def draw(cases: dict[str, Any], path: Path) -> None:
    """Acceptance over steps and over seconds, reward, and seconds saved less spent."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 2).reshape(-1)
    for name in next(iter(cases.values())):
        arms = [case[name] for case in cases.values()]

        def mean(key: str, arms: list[dict[str, Any]] = arms) -> np.ndarray:
            return np.mean([arm[key] for arm in arms], axis=0)

        net = np.cumsum(mean("saved_seconds") - mean("spent_seconds"))
        elapsed = np.cumsum(mean("seconds"))
        for ax, x, y in zip(axes, (None, elapsed, None, None), (
                mean("acceptance"), mean("acceptance"), mean("reward"), net), strict=True):
            ax.plot(np.arange(len(y)) if x is None else x, y, label=name)
    titles = ("acceptance", "acceptance over wall-clock", "reward", "seconds saved less spent")
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xlabel("seconds" if "wall" in title else "RL step")
        ax.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
