"""Prints what the controller of a run chose, step by step or launch by launch, and what it gained.

    python experiments/explain.py runs/x                 # a line a step
    python experiments/explain.py runs/x --step=3        # a line a launch of that step

`plain` is what the same tokens were to cost in plain rounds, by the table of costs as corrected so
far. `saved` is `plain` less `launches`, the measured seconds of the rollout without its prefill;
`regret` is what launches lost against plain rounds.

Exit status: 0, or 2 for bad input.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from interrupt import until_stopped
from rich.console import Console
from rich.table import Table

from specrl_jax.config import ConfigError
from specrl_jax.metrics.launches import recorded
from specrl_jax.metrics.run_files import read_metrics
from specrl_jax.model.source import run_config
from specrl_jax.runtime.workdir import METRICS

BAD_INPUT = 2
Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help="of a run")
    parser.add_argument("--step", type=int, help="show every launch of this step")
    args = parser.parse_args(argv)
    try:
        rows = explained(args.workdir)
        shown = by_launch(rows, args.step, args.workdir) if args.step is not None else by_step(rows)
    except ConfigError as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        return BAD_INPUT
    Console(width=None if sys.stdout.isatty() else 190).print(shown)
    return 0


def explained(workdir: Path) -> list[dict[str, Any]]:
    """Returns the steps of a run that record a choice.

    Raises:
      ConfigError: there are none.
    """
    rows = [row for row in read_metrics(workdir) if "control/draft_depth" in row]
    if not rows:
        run_config(workdir)  # an older version's run is refused here
        raise ConfigError(f"{workdir / METRICS}: no step records a choice: is this a run with a "
                          f"drafter?")
    return rows


def by_step(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table with a line a step."""
    columns: list[Column] = [
        ("step", lambda r: str(r["step"])), ("depth", _number("control/draft_depth", ".2f")),
        ("drafting", _number("control/drafting", ".0%")),
        ("verified", _number("control/verify_tokens", ".1f")),
        ("rollout s", _number("time/rollout", ".3g")),
        ("launches s", _launches), ("predicted s", _number("control/predicted_seconds", ".3g")),
        ("error", _number("time/cost_error", ".0%")),
        ("plain s", _number("control/plain_seconds", ".3g")),
        ("saved s", _number("time/saved", "+.3g")), ("spent s", _number("time/spent", ".3g")),
        ("regret s", _number("time/regret", ".3g"))]
    return _table(columns, rows)


def by_launch(rows: Sequence[Mapping[str, Any]], step: int, workdir: Path) -> Table:
    """Returns a table with a line a launch.

    Raises:
      ConfigError: the step is not there.
    """
    chosen = [row for row in rows if row["step"] == step]
    if not chosen:
        raise ConfigError(f"--step={step}: {workdir} has the steps {rows[0]['step']} to "
                          f"{rows[-1]['step']}")
    columns: list[Column] = [
        ("batch", _number("batch", ".0f")), ("live", _number("live", ".1f")),
        ("rounds", _number("rounds", ".0f")), ("depth", _number("draft_depth", ".2f")),
        ("drafts a row", _number("drafts", ".2f")),
        ("verified", _number("verify_tokens", ".1f")), ("tokens", _number("tokens", ".0f")),
        ("ms", _milliseconds("seconds")), ("predicted ms", _milliseconds("predicted_seconds")),
        ("plain ms", _milliseconds("plain_seconds"))]
    return _table(columns, recorded(chosen[0]))


def _number(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: format(row[name], form) if name in row else ""


def _launches(row: Mapping[str, Any]) -> str:
    """Returns the seconds of all launches: plain seconds less saved ones."""
    estimates = row.get("control/plain_seconds"), row.get("time/saved")
    return "" if None in estimates else format(estimates[0] - estimates[1], ".3g")


def _milliseconds(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{1e3 * row[name]:.3g}" if name in row else ""


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    for name, _ in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(show(row) for _, show in columns))
    return table


if __name__ == "__main__":
    sys.exit(until_stopped(main))
