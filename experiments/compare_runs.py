"""Compares the tokens of two runs, and tells near ties from real differences.

    python experiments/compare_runs.py runs/spec runs/plain
    python experiments/compare_runs.py runs/spec runs/plain --all_steps    # learning rate 0

In the first step that differs, the first difference of each sequence is recomputed with A's weights
of that step (its nearest earlier checkpoint, with the steps between repeated). It is a near tie if
rounding explains it: if the perturbed scores of both tokens are within the tolerance of the best,
which is the span of the errors that the model's dtype makes there, at least 1e-4. Else it is a real
difference. Later steps have other weights and are not compared, unless the learning rate is 0 and
--all_steps is given. Nor are steps after one in which a reward failed in one run alone (a limit of
time, a service).

Exit status: 0 all tokens are equal or near ties, 1 real differences, 2 bad input.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from interrupt import until_stopped
from rich.console import Console
from rich.table import Column, Table

from specrl_jax.config import ConfigError
from specrl_jax.evaluation.compare import (
    StepComparison,
    check_comparable,
    compare_steps,
    config_differences,
    equal_bits,
)
from specrl_jax.metrics.run_files import read_metrics
from specrl_jax.model.source import run_config
from specrl_jax.runtime.compilation import use_persistent_cache
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.paths import output_file
from specrl_jax.runtime.stderr import say
from specrl_jax.training.audit import Replay, Ruling, replay, rule

EQUAL, REAL, BAD_INPUT = 0, 1, 2
ROWS_SHOWN = 40
NOTHING_DRAFTED = ("neither run accepted a draft, so this comparison says nothing about "
                   "speculation: use --config.control.policy=fixed")


def main(argv: Sequence[str] | None = None) -> int:
    """Compares the runs that the arguments name; returns the exit status."""
    args = _parse(argv)
    try:
        return compare(args)
    except ConfigError as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        return BAD_INPUT


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A", help="working directory of a run")
    parser.add_argument("b", type=Path, metavar="B", help="working directory of another run")
    parser.add_argument("--all_steps", action="store_true",
                        help="continue after the first step that differs; needs learning rate 0")
    parser.add_argument("--force", action="store_true",
                        help="compare although the configs promise different tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there")
    return parser.parse_args(argv)


def compare(args: argparse.Namespace) -> int:
    """Compares, prints, writes; returns the exit status."""
    if args.json:
        args.json = output_file("--json", args.json)
    fields = config_differences(args.a, args.b)
    if not args.force:
        check_comparable(fields)
    if args.all_steps:
        check_weights_fixed(args.a, args.b)
    steps = compared_steps(args)
    differ = [step for step in steps if step.differences]
    rulings, replayed = [], None
    if differ:
        use_persistent_cache()
        replayed = replay(args.a, differ[0].step, say)
        rulings = rule(replayed, [d for step in differ for d in step.differences])
    result = findings(args, fields, steps, rulings, replayed)
    show(result, rulings, _decoder(replayed))
    if args.json:
        write_atomically(args.json, json.dumps(result, indent=2, allow_nan=False) + "\n")
    return REAL if result["real"] else EQUAL


def check_weights_fixed(*runs: Path) -> None:
    """Raises ConfigError unless the learning rate is 0."""
    for run in runs:
        rate = run_config(run).learner.learning_rate
        if rate != 0:
            raise ConfigError(f"--all_steps: {run} has learner.learning_rate = {rate}, so steps "
                              f"after a difference follow other weights; drop --all_steps")


def compared_steps(args: argparse.Namespace) -> list[StepComparison]:
    """Returns the compared steps: up to the first that differs, or all."""
    taken = []
    for step in compare_steps(args.a, args.b):
        taken.append(step)
        if (step.differences or step.failed_apart) and not args.all_steps:
            break
    return taken


def findings(args: argparse.Namespace, fields: dict[str, Any], steps: list[StepComparison],
             rulings: list[Ruling], replayed: Replay | None) -> dict[str, Any]:
    """Returns the findings as JSON values; a score or gap that is not finite is null."""
    numbers = {step.step for step in steps}
    tokens = sum(step.tokens for step in steps)
    near = sum(r.near_tie for r in rulings)
    return {
        "a": str(args.a), "b": str(args.b), "config_differences": fields,
        "steps": len(steps), "sequences": sum(step.sequences for step in steps), "tokens": tokens,
        "first_step_that_differs": next((s.step for s in steps if s.differences), None),
        "rewards_failed_apart": {s.step: s.failed_apart for s in steps if s.failed_apart},
        "steps_of_equal_bits": equal_bits(args.a, args.b, [step.step for step in steps]),
        "accept_length": [accept_length(run, numbers) for run in (args.a, args.b)],
        "near_ties": near, "real": len(rulings) - near,
        "per_million_tokens": 1e6 * len(rulings) / tokens,
        "checkpoint": replayed and replayed.checkpoint,
        "replay_deviations": replayed and replayed.deviations,
        "differences": [_record(r) for r in rulings]}


def accept_length(run: Path, steps: Collection[int]) -> float | None:
    """Returns the mean accept length over `steps`; None if the run did not record it."""
    lengths = [row["rollout/accept_length"] for row in read_metrics(run)
               if row["step"] in steps and "rollout/accept_length" in row]
    return statistics.mean(lengths) if lengths else None


def _record(ruling: Ruling) -> dict[str, Any]:
    d = ruling.difference
    numbers = {"score_a": ruling.score_a, "score_b": ruling.score_b, "gap": ruling.gap,
               "tolerance": ruling.tolerance}
    return {"step": d.step, "prompt_id": d.key[0], "occurrence": d.key[1], "sample_id": d.key[2],
            "position": d.position, "token_a": d.a, "token_b": d.b, "drawn": ruling.drawn,
            "near_tie": ruling.near_tie,
            **{name: x if math.isfinite(x) else None for name, x in numbers.items()}}


def show(result: dict[str, Any], rulings: list[Ruling], text: Callable[[int | None], str]) -> None:
    """Prints the findings."""
    console = Console(highlight=False, soft_wrap=True)
    for field, (a, b) in result["config_differences"].items():
        console.print(f"{field}: {a!r} in A, {b!r} in B", markup=False)
    show_accept_length(console, result["accept_length"])
    for step, count in result["rewards_failed_apart"].items():
        console.print(f"step {step}: rewards of {count} equal answers failed in one run alone, so "
                      f"the runs have other weights from then on, whatever the drafter")
    if not rulings:
        console.print(f"equal: {result['steps']} steps, {result['sequences']} sequences, "
                      f"{result['tokens']} tokens; log-probabilities, loss and weights equal to "
                      f"the last bit in {result['steps_of_equal_bits']} steps")
        return
    console.print(table(rulings[:ROWS_SHOWN], text))
    if len(rulings) > ROWS_SHOWN:
        console.print(f"and {len(rulings) - ROWS_SHOWN} more; --json=FILE lists all")
    if result["replay_deviations"]:
        console.print(f"WARNING: repeated steps generated {result['replay_deviations']} "
                      f"sequences that differ from A's, so these gaps may be of other weights")
    console.print(f"first step that differs: {result['first_step_that_differs']}")
    console.print(f"{len(rulings)} sequences differ in {result['tokens']} tokens compared, "
                  f"{result['per_million_tokens']:.3g} per million: {result['near_ties']} near "
                  f"ties, {result['real']} real differences")


def show_accept_length(console: Console, lengths: Sequence[float | None]) -> None:
    """Prints tokens per round of both runs, and a warning if neither accepted a draft."""
    a, b = ("not recorded" if length is None else f"{length:.2f}" for length in lengths)
    console.print(f"accept length: {a} in A, {b} in B")
    if all(length == 1 for length in lengths):
        console.print(NOTHING_DRAFTED)


def table(rulings: list[Ruling], text: Callable[[int | None], str]) -> Table:
    """Returns one line per difference."""
    shown = Table("step", "prompt", "sample", "pos", "A", "B", "gap", "limit",
                  Column(no_wrap=True))
    for r in rulings:
        d = r.difference
        shown.add_row(str(d.step), str(d.key[0]), str(d.key[2]), str(d.position), text(d.a),
                      text(d.b), f"{r.gap:.2g}", f"{r.tolerance:.2g}",
                      "near tie" if r.near_tie else "real")
    return shown


def _decoder(replayed: Replay | None) -> Callable[[int | None], str]:
    """Returns a function from a token id to the id and its text."""
    def text(token: int | None) -> str:
        if token is None:
            return "ended"
        return f"{token} {replayed.trainer.tokenizer.decode([token])!r}"

    return text


if __name__ == "__main__":
    sys.exit(until_stopped(main))
