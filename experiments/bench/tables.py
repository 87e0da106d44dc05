"""Tables of benchmark results."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 160  # columns where standard output is no terminal


def console() -> Console:
    """Returns a console that does not fold tables where there is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def between(quantiles: dict[str, Any], scale: float = 1.0, digits: int = 1) -> str:
    """Returns median and range of a spread as text."""
    median, low, high = (quantiles[name] * scale for name in ("median", "min", "max"))
    return f"{median:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def adapting_table(result: dict[str, Any]) -> Table:
    """Returns what each way of choosing a setting gains, and up to which load, by drafter."""
    table = Table("drafter", "geometric mean over loads (95 % interval), harmonic mean",
                  "gains up to rows", title="gain from adapting to the load",
                  caption="speed over plain decoding; chosen on even repeats, judged on odd ones")
    for name, one in result.items():
        ways = [f"{way}: {_with_interval(mean)}, {one['harmonic'][way]['speed']:.3f}"
                for way, mean in one["geometric"].items()]
        loads = [f"{arm}: {'all' if load is None else format(load, '.0f')}"
                 for arm, load in one["break_even"].items()]
        table.add_row(name, "\n".join(ways), "\n".join(loads), end_section=True)
    return table


def _with_interval(ratio: dict[str, float]) -> str:
    interval = f" ({ratio['low']:.3f} .. {ratio['high']:.3f})" if "low" in ratio else ""
    return f"{ratio['speed']:.3f}{interval}"


def speculation_table(case: dict[str, Any]) -> Table:
    """Returns each arm of one batch size against plain decoding."""
    table = Table("drafter and setting", "tokens/s", "over plain", "accept length",
                  "drafted a row", "ms a round", "calibration error", "same tokens", "compiled",
                  title=f"{case['rows']} rows, {case['tokens']} tokens", caption="median (range)")
    for name, one in case["arms"].items():
        table.add_row(
            name, between(one["tokens_per_second"]), between(one["speedup"], digits=2),
            f"{one['accept_length']:.2f}", f"{one['drafted_a_row']:.2f}",
            between(one["round_seconds"], 1e3), f"{one['calibration_error']:.3f}",
            "yes" if one["equal_tokens"] else "no", str(one["compilations"]))
    return table
