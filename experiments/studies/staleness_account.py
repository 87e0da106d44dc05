"""Measures of the arms of staleness against the run without speculation."""

from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax.config import Config, ConfigError
from specrl_jax.evaluation.statistics import student
from specrl_jax.metrics.run_files import read_metrics, read_samples
from specrl_jax.runtime.digest import digest

TAIL = 0.25  # share of the steps that counts as the beginning or the end of a run
DIGITS = 5  # significant ones
PLAIN = "plain"
WATCHED = ("entropy", "unexplained")  # measured only by arms with a trigger
Account = dict[str, Any]
Cases = dict[str, dict[str, Account]]
"""Seed -> arm -> its account."""


def account(workdir: Path, config: Config, plain: Account | None) -> Account:
    """Returns the measures of an arm against the plain run, or against itself if there is none.

    Raises:
      ConfigError: a token differs although the match rule and invariant numerics exclude that.
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


def _digest(workdir: Path) -> str:
    """Returns the hash of all tokens of a run, in order."""
    tokens = [sample["tokens"] for sample in read_samples(workdir)]
    return digest([tokens])


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


# Over seeds.


def numbers(case: dict[str, Account]) -> dict[str, dict[str, float]]:
    """Returns the numbers that are compared, for each arm of one seed.

    `at_equal_seconds`: when the arm that ended first did. `ahead`: whole steps against those of the
    plain run; unlike `net` it includes how much late updates slow the policy update.
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
    """Returns the mean over the last quarter of the steps, or the first."""
    part = max(int(TAIL * len(values)), 1)
    return float(np.mean(values[:part] if first else values[-part:]))


def summarize(cases: Cases, reference: str) -> dict[str, Any]:
    """Returns [mean, low, high] over seeds of each arm's numbers, and of their differences to the
    reference arm, paired by seed; and the mean distance of its reward curve from the plain one.

    Intervals are Student's at 95 %; with one seed low and high are the value itself.
    """
    by_seed = {seed: numbers(case) for seed, case in cases.items()}

    def over(values: list[float]) -> list[float]:
        low, high = student(values) if len(values) > 1 else (values[0], values[0])
        return [float(np.mean(values)), low, high]

    summary = {}
    for name in dict.fromkeys(name for case in cases.values() for name in case):
        mine = [case[name] for case in by_seed.values() if name in case]
        pairs = [(case[name], case[reference]) for case in by_seed.values()
                 if name in case and reference in case]
        off = [float(np.mean(np.abs(np.subtract(case[name]["reward"], case[PLAIN]["reward"]))))
               for case in cases.values() if name in case]
        summary[name] = {"seeds": len(mine), "reward_distance": over(off)} | {
            key: over([one[key] for one in mine]) for key in mine[0]}
        if pairs:
            summary[name][f"over_{reference}"] = {
                key: over([a[key] - b[key] for a, b in pairs])
                for key in mine[0] if all(key in b for _, b in pairs)}
    return summary
