"""What the controller of a run chose, step by step or launch by launch, and what it was worth.

    python experiments/explain.py runs/x                 # a line a step
    python experiments/explain.py runs/x --step=3        # a line a launch of that step

`saved` is what the same tokens were to take without a draft, less what they took; `regret` is what
was lost against the better of that and the best constant depth. Both compare with predictions of
the table of costs as corrected, which hold drafts' tokens to be worth `lag` times fewer plain
rounds: rows that drafts bring ahead of others do not end the rollout. A `trial` (1) took little
known prices for lower than they are believed to be. An audit (config.control.audit) really ran such
rounds: `audit off` and `audit fixed` have their tokens per second, `chosen` those of the choice.

Exit status: 0, or 2 for bad input.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specrl_jax.config import ConfigError
from specrl_jax.io.launches import recorded
from specrl_jax.io.metrics import METRICS, read_metrics

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
    """The steps of a run whose controller explains itself.

    Raises:
      ConfigError: there is none.
    """
    rows = [row for row in read_metrics(workdir) if "control/draft_depth" in row]
    if not rows:
        raise ConfigError(f"{workdir / METRICS}: no step explains a choice: is this a run with "
                          f"--config.control.policy=budget, respec, bandit or oracle?")
    return rows


def by_step(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns: list[Column] = [
        ("step", lambda r: str(r["step"])), ("depth", _number("control/draft_depth", ".2f")),
        ("drafting", _number("control/drafting", ".0%")),
        ("packed", _number("control/verify_tokens", ".1f")),
        ("switches", _number("control/switches", ".0f")),
        ("rollout s", _number("time/rollout", ".3g")),
        ("launches s, predicted", _number("control/predicted_seconds", ".3g")),
        ("error", _number("time/control_error", ".0%")),
        ("off s", _number("control/plain_seconds", ".3g")),
        ("best fixed s", _number("control/fixed_seconds", ".3g")),
        ("saved s", _number("time/saved", "+.3g")), ("spent s", _number("time/spent", ".3g")),
        ("regret s", _number("time/regret", ".3g"))]
    return _table(columns, rows)


def by_launch(rows: Sequence[Mapping[str, Any]], step: int, workdir: Path) -> Table:
    """
    Raises:
      ConfigError: the step is not there.
    """
    found = [row for row in rows if row["step"] == step]
    if not found:
        raise ConfigError(f"--step={step}: {workdir} has the steps {rows[0]['step']} to "
                          f"{rows[-1]['step']}")
    columns: list[Column] = [
        ("batch", _number("batch", ".0f")), ("live", _number("live", ".1f")),
        ("context", _number("context", ".0f")), ("rounds", _number("launch_rounds", ".0f")),
        ("depth", _number("steps", ".2f")), ("packed", _number("width", ".1f")),
        ("tokens", _number("tokens", ".0f")),
        ("predicted", _number("predicted_tokens", ".1f")),
        ("ms", lambda r: f"{1e3 * r['seconds']:.3g}"),
        ("predicted ms", lambda r: f"{1e3 * r['predicted_seconds']:.3g}"),
        ("off ms", lambda r: f"{1e3 * r['off_seconds']:.3g}"),
        ("best fixed ms", lambda r: f"{1e3 * r['fixed_seconds']:.3g}"),
        ("its depth", _number("fixed_steps", ".0f"))]
    launches = recorded(found[0])
    for name in ("branch", "nodes", "lag", "trial"):
        if all(name in launch for launch in launches):  # earlier runs have none
            columns.append((name, _number(name, ".2f")))
    if any("audit_off_seconds" in launch for launch in launches):
        columns.append(("chosen", lambda r: f"{r['tokens'] / r['seconds']:.0f}"))
        columns += [(f"audit {name}", _audited(name)) for name in ("off", "fixed")]
    return _table(columns, launches)


def _number(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: format(row[name], form)


def _audited(name: str) -> Callable[[Mapping[str, Any]], str]:
    def tokens_per_second(row: Mapping[str, Any]) -> str:
        if f"audit_{name}_seconds" not in row:
            return ""
        return f"{row[f'audit_{name}_tokens'] / row[f'audit_{name}_seconds']:.0f}"

    return tokens_per_second


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    for name, _ in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(show(row) for _, show in columns))
    return table


if __name__ == "__main__":
    sys.exit(main())
