"""Comparison of the tokens of two runs, from their files alone."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specrl_jax.checkpoint.resume import EQUAL, FREE, among
from specrl_jax.config import ConfigError
from specrl_jax.metrics.run_files import check_sample, read_metrics, read_samples
from specrl_jax.runtime.workdir import flat, read_config
from specrl_jax.structs import Json

# Metrics of a step that differ as soon as a weight, a log-probability or a gradient does.
BITS = ("checksum/policy", "rollout/logprob", "rollout/logprob_gap_max", "loss", "grad_norm")

COMPARED = {"prompt_id": int, "occurrence": int, "sample_id": int, "prompt": str, "tokens": list}

Key = tuple[int, int, int, int]  # prompt id, occurrence, sample id, step in which it began


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token in which a sequence differs. None: the sequence had ended."""

    step: int
    key: Key
    position: int  # index in the response
    a: int | None
    b: int | None
    prompt: str
    before: list[int]  # response tokens that are equal


@dataclasses.dataclass(frozen=True)
class StepComparison:
    """The comparison of one step of two runs."""

    step: int
    sequences: int
    tokens: int  # compared: up to and with each sequence's first difference
    differences: list[Difference]
    failed_apart: int = 0  # answers whose reward failed in one run alone


def config_differences(a: Path, b: Path) -> dict[str, tuple[Any, Any]]:
    """Returns dotted field -> values of both runs, where they differ. Raises ConfigError if a
    directory holds no run."""
    mine, theirs = (read_config(run) for run in (a, b))
    if mine is None or theirs is None:
        raise ConfigError(f"{b if mine else a}: no config.json; give the working directory of a "
                          "run")
    mine, theirs = flat(mine), flat(theirs)
    return {field: (mine.get(field), theirs.get(field))
            for field in sorted(mine.keys() | theirs.keys())
            if mine.get(field) != theirs.get(field)}


def check_comparable(differences: dict[str, tuple[Any, Any]]) -> None:
    """Raises ConfigError, naming the field, if the runs need not have the same tokens."""
    for field, (a, b) in differences.items():
        if not among(field, [*FREE, *EQUAL]):
            raise ConfigError(f"{field} = {a!r} in A and {b!r} in B: these runs differ in "
                              f"tokens by design; give --force to compare them anyway")


def compare_steps(a: Path, b: Path) -> Iterator[StepComparison]:
    """Yields the comparison of each step that both runs completed, in order. Raises ConfigError if
    there is none, or the sequences of a step are not the same in both."""
    completed = [[row["step"] for row in read_metrics(run)] for run in (a, b)]
    for run, steps in zip((a, b), completed, strict=True):
        if not steps:
            raise ConfigError(f"{run}: no completed step; wait for one, or give another run")
    last = min(map(max, completed))  # samples are written before metrics
    if next(_by_step(a), None) is None or next(_by_step(b), None) is None:
        raise ConfigError(f"{a} and {b}: samples.jsonl must be in both, it is what is compared")
    for (step, mine), (other, theirs) in zip(_by_step(a), _by_step(b), strict=False):
        if step > last:
            return
        if step != other:
            raise ConfigError(f"{b}: samples of step {other} where A has step {step}; the file is "
                              f"incomplete")
        yield compare_step(step, mine, theirs)


def compare_step(step: int, a: dict[Key, Json], b: dict[Key, Json]
                 ) -> StepComparison:
    """Compares the records of one step, by key. Raises ConfigError if they are not of the same
    sequences, although no reward failed in one run alone: with rl.filter others are chosen then."""
    keys = sorted(a.keys() | b.keys())
    apart = sum(_failed_apart(a.get(key), b.get(key)) for key in keys)
    tokens, differences = 0, []
    for key in keys:
        here = f"step {step}: prompt {key[0]} (occurrence {key[1]}, sample {key[2]})"
        if key not in a or key not in b:
            if apart:
                continue
            raise ConfigError(f"{here} is only in {'A' if key in a else 'B'}: the runs had "
                              f"different prompts, or rl.filter kept other groups after a near "
                              f"tie; compare runs of the same data and seed")
        if a[key]["prompt"] != b[key]["prompt"]:
            raise ConfigError(f"{here} is {a[key]['prompt']!r} in A and {b[key]['prompt']!r} in "
                              f"B; compare runs of the same data")
        mine, theirs = a[key]["tokens"], b[key]["tokens"]
        at = first_difference(mine, theirs)
        tokens += len(mine) if at is None else at + 1
        if at is not None:
            differences.append(Difference(
                step, key, at, *(x[at] if at < len(x) else None for x in (mine, theirs)),
                prompt=a[key]["prompt"], before=mine[:at]))
    return StepComparison(step, len(a), tokens, differences, apart)


def _failed_apart(a: Json | None, b: Json | None) -> bool:
    """Returns whether a reward failed for one of two equal answers and made another reward, or for
    an answer that the other run has not: it would have it if that had failed, too."""
    if a is None or b is None:
        return "failures" in (a or b or {})
    return (("failures" in a or "failures" in b) and a["tokens"] == b["tokens"]
            and a.get("reward") != b.get("reward"))


def key_of(sample: Json) -> Key:
    """Returns what names a sample among those of its step."""
    began = sample.get("birth", -1)  # only with rollout.quota may it be another step
    return sample["prompt_id"], sample["occurrence"], sample["sample_id"], began


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Returns the first index at which the lists differ, None if they are equal."""
    pairs = enumerate(itertools.zip_longest(a, b))
    return next((i for i, (x, y) in pairs if x != y), None)


def equal_bits(a: Path, b: Path, steps: Sequence[int]) -> int:
    """Returns how many of these steps have equal weights, log-probs, loss and gradient, bit for
    bit, as invariant numerics promise."""
    mine, theirs = ({r["step"]: [r.get(name) for name in BITS] for r in read_metrics(run)}
                    for run in (a, b))
    return sum(None not in mine[step] and mine[step] == theirs[step] for step in steps)


def _by_step(run: Path) -> Iterator[tuple[int, dict[Key, Json]]]:
    for step, records in itertools.groupby(_samples(run), key=lambda r: r["step"]):
        yield step, {key_of(r): r for r in records}


def _samples(run: Path) -> Iterator[Json]:
    for sample in read_samples(run):
        check_sample(run, sample, COMPARED)
        yield sample
