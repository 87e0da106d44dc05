"""The pictures of report.html, each with a sentence on how to read it.

A picture is SVG inside the page: its text is text, and its colors are the page's variables, which
differ in dark mode.
"""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specrl_jax.config import ConfigError
from specrl_jax.metrics.launches import LAUNCHES, recorded
from specrl_jax.runtime.workdir import METRICS

RELIABILITY = "rollout/reliability"
LENGTHS = "lengths"  # of the last row: (length, responses) of all samples
LISTS = (RELIABILITY, LAUNCHES, LENGTHS)
BLUE, YELLOW, GREEN, RED, GREY = "#4269d0", "#efb118", "#3ca951", "#ff725c", "#9c9c9c"
VIOLET, BLACK, GRID = "#a463f2", "#000000", "#b0b0b0"
VARIABLES = {BLUE: "var(--blue)", YELLOW: "var(--yellow)", GREEN: "var(--green)", RED: "var(--red)",
             VIOLET: "var(--violet)", GREY: "var(--grey)", BLACK: "currentColor"}  # of the page
COLORS = {"rollout": BLUE, "reward": YELLOW, "learn": GREEN, "distill": VIOLET, "other": GREY}
BINS = 40
MOST_POINTS = 300  # of a curve; more are averaged

Rows = Sequence[Mapping[str, Any]]


class Plot(NamedTuple):
    """What is needed to draw a picture."""

    section: str
    name: str
    key: str  # the metric without which there is nothing to draw
    read: str  # how to read the picture
    draw: Callable[[Axes, Rows], None]
    expected: bool = True  # the page notes it where it is missing
    xlabel: str = "step"


def figures(rows: Rows, lengths: Mapping[int, int]) -> dict[str, list[tuple[Plot, str]]]:
    """Returns the pictures and their SVG by section; "" for an expected one without its metric.

    Args: lengths, how many responses have each length.
    """
    rows = [*rows[:-1], {**rows[-1], LENGTHS: sorted(lengths.items())}]
    by_section: dict[str, list[tuple[Plot, str]]] = {}
    for plot in PLOTS:
        svg = draw_svg(plot, rows) if _recorded(rows, plot.key) else ""
        if svg or plot.expected:
            by_section.setdefault(plot.section, []).append((plot, svg))
    return by_section


def _recorded(rows: Rows, key: str) -> bool:
    if key in LISTS:
        return any(row.get(key) for row in rows)
    return bool(np.isfinite(column(rows, key)).any())


def column(rows: Rows, key: str) -> np.ndarray:
    """Returns one metric of all steps, f64[steps]; NaN where it is absent. Raises ConfigError if it
    is no number."""
    values = [row.get(key, np.nan) for row in rows]
    for row, value in zip(rows, values, strict=True):
        if not isinstance(value, int | float):
            raise ConfigError(f"{METRICS}: {key} = {value!r} in step {row['step']}: is no number; "
                              f"restore the file from a copy")
    return np.array(values, dtype=float)


def draw_svg(plot: Plot, rows: Rows) -> str:
    """Returns one figure as an SVG element. It avoids pyplot, which keeps global state."""
    figure = Figure(figsize=(4.9, 2.9), layout="constrained")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name,
                                "font.size": 11, "axes.labelsize": "medium"}):
        ax = figure.subplots()
        plot.draw(ax, rows)
        ax.set_xlabel(plot.xlabel)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0] and not figure.legends:
            ax.legend(frameon=False, fontsize=10)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(buffer.getvalue(), plot.name)


def _for_page(svg: str, title: str) -> str:
    """Returns the SVG element of a file of matplotlib, with the page's size, font and colors."""
    svg = svg[svg.index("<svg"):].strip()
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="(?!m|p|clip)[^"]*"| (?:width|height)="[\d.]+pt"|font-family: [^;]*; ', "",
                 svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg


def curve(rows: Rows, key: str) -> np.ndarray:
    """Returns `column`, f64[steps], averaged in blocks to at most MOST_POINTS values."""
    return thinned(column(rows, key))


def thinned(values: np.ndarray, reduce: str = "mean") -> np.ndarray:
    """Returns the finite means, or "max" for peaks, of at most MOST_POINTS equal blocks of a
    series; NaN where a block has no finite value."""
    block = -(-len(values) // MOST_POINTS)
    padded = np.pad(values, (0, -len(values) % block), constant_values=np.nan)
    blocks = np.ma.masked_invalid(padded.reshape(-1, block))
    return getattr(blocks, reduce)(1).filled(np.nan)


def line(key: str) -> Callable[[Axes, Rows], None]:
    """Returns a function that plots one metric over steps."""
    return lambda ax, rows: plot_line(ax, rows, key)


def plot_accuracy(ax: Axes, rows: Rows) -> None:
    """Draws the evaluations of a run with their 95 % intervals."""
    evaluated = [row for row in rows if "eval/accuracy" in row]
    plot_line(ax, evaluated, "eval/accuracy")
    ax.fill_between(curve(evaluated, "step"), curve(evaluated, "eval/accuracy_low"),
                    curve(evaluated, "eval/accuracy_high"), color=BLUE, alpha=0.2, linewidth=0)


def plot_line(ax: Axes, rows: Rows, key: str) -> None:
    """Plots one metric over steps."""
    marker = "." if len(rows) <= 50 else ""
    ax.plot(curve(rows, "step"), curve(rows, key), color=BLUE, marker=marker)
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.grid(alpha=0.25)


def plot_reward(ax: Axes, rows: Rows) -> None:
    """Plots the mean reward over steps, with one standard deviation of a step's rewards."""
    mean, std = curve(rows, "reward/mean"), curve(rows, "reward/std")
    plot_line(ax, rows, "reward/mean")
    if np.isfinite(std).any():
        ax.fill_between(curve(rows, "step"), mean - std, mean + std, color=BLUE, alpha=0.2,
                        linewidth=0)


def shares(rows: Rows) -> dict[str, np.ndarray]:
    """Returns each phase's share of a step's seconds, f64[steps]; the rest is "other"."""
    total = curve(rows, "time/step")
    parts = {name: np.nan_to_num(curve(rows, f"time/{name}") / total)
             for name in COLORS if name != "other"}
    return parts | {"other": np.clip(1 - sum(parts.values()), 0, None)}


def plot_shares(ax: Axes, rows: Rows) -> None:
    """Plots the shares of the phases as one stacked bar a step."""
    steps = curve(rows, "step")
    bottom, width = np.zeros(len(steps)), 1 if len(steps) == 1 else steps[1] - steps[0]
    edges = np.append(steps, steps[-1] + width) - width / 2
    for name, share in shares(rows).items():
        ax.stairs(bottom + share, edges, baseline=bottom, fill=True, color=COLORS[name],
                  label=name)
        bottom = bottom + share
    ax.set_ylim(0, 1)
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.figure.legend(frameon=False, fontsize=10, ncols=len(COLORS), loc="outside lower center",
                     handlelength=1, columnspacing=1)


def plot_setting(ax: Axes, rows: Rows) -> None:
    """Plots draft depth and verified tokens of each launch; of many, the peaks of blocks."""
    launches = [launch | {"step": row["step"] + i / len(of)} for row in rows
                for of in [recorded(row)] for i, launch in enumerate(of)]
    width = column(launches, "verify_tokens") / np.maximum(column(launches, "batch"), 1)
    steps = thinned(column(launches, "step"), "max")
    for values, color, label in ((column(launches, "draft_depth"), BLUE, "draft depth"),
                                 (width, YELLOW, "verified tokens per slot")):
        ax.step(steps, thinned(values, "max"), where="post", color=color, linewidth=0.8,
                label=label)
    ax.set_ylim(bottom=0)


def plot_saved(ax: Axes, rows: Rows) -> None:
    """Plots running sums of the seconds that the controller saved, spent and lost."""
    _plot_sums(ax, rows, [(name, np.nancumsum(column(rows, f"time/{name}")), color) for name, color
                          in (("saved", GREEN), ("spent", YELLOW), ("regret", RED))])
    ax.axhline(0, color=GREY, linewidth=0.8)


def plot_net(ax: Axes, rows: Rows) -> None:
    """Plots running sums of seconds saved by speculation and spent on the drafter."""
    spent = np.nancumsum(column(rows, "time/distill"))
    net = column(rows, "time/speculation_net")
    _plot_sums(ax, rows, [("saved", net + spent, GREEN), ("spent", spent, YELLOW),
                          ("saved less spent", net, BLUE)])
    ax.axhline(0, color=GREY, linewidth=0.8)


def _plot_sums(ax: Axes, rows: Rows, lines: Sequence[tuple[str, np.ndarray, str]]) -> None:
    for name, values, color in lines:
        ax.plot(curve(rows, "step"), thinned(values), color=color, label=name)
    ax.set_ylabel("seconds, summed")
    ax.grid(alpha=0.25)


def plot_reliability(ax: Axes, rows: Rows) -> None:
    """Plots accepted share over estimated acceptance, in tenths of the estimate, over all steps."""
    tried, estimate, accepted = np.concatenate(
        [np.reshape(row.get(RELIABILITY, []), (-1, 3)) for row in rows]).T
    tenth = np.minimum((10 * estimate).astype(int), 9)
    count, x, y = (np.bincount(tenth, tried * a, 10) for a in (1.0, estimate, accepted))
    seen = count > 0
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    ax.scatter(x[seen] / count[seen], y[seen] / count[seen], color=BLUE,
               s=10 + 90 * count[seen] / count.max())
    ax.set_ylabel("accepted share")


def plot_lengths(ax: Axes, rows: Rows) -> None:
    """Plots a histogram of response lengths."""
    lengths, counts = np.transpose(rows[-1][LENGTHS])
    ax.hist(lengths, bins=min(BINS, np.ptp(lengths) + 1), weights=counts, color=BLUE)
    ax.set_ylabel("samples")


PLOTS = (
    Plot("speculation", "tokens per second", "rollout/tokens_per_second",
         "Response tokens per second of rollout, which other work on the machine slows, too: "
         "compare runs on a quiet one.", line("rollout/tokens_per_second")),
    Plot("speculation", "accept length (tokens per round)", "rollout/accept_length",
         "Tokens that a row gains in one forward pass of the actor: 1 is plain decoding, and a "
         "fall at an unchanged draft depth means that the drafter has gone stale.",
         line("rollout/accept_length")),
    Plot("speculation", "draft depth and verified tokens over time", LAUNCHES,
         "What each launch used: depth 0 is plain decoding, and drafts become deeper at the "
         "end of a rollout, where few rows are live.", plot_setting, False),
    Plot("speculation", "seconds saved, spent and lost by the controller", "time/regret",
         "Sums since the first step: above 0, saved is faster than plain decoding; spent is "
         "the cost of drafts, and regret what slow launches lost.", plot_saved, False),
    Plot("speculation",
         "seconds saved by speculation (estimated) less those spent on the drafter",
         "time/speculation_net",
         "Sums since the first step: where the blue line rises, the drafter brings more time "
         "than its training takes.", plot_net, False),
    Plot("speculation", "how often drafts were accepted, all steps", RELIABILITY,
         "Each point is draft tokens with a similar estimate, larger for more: on the diagonal "
         "the controller's estimates are right, below it they are too high.",
         plot_reliability, False, "estimate"),
    Plot("learning", "reward", "reward/mean",
         "The mean of a step's samples, which should rise; the band is one standard deviation, "
         "and where it closes, all responses score alike and teach nothing.", plot_reward),
    Plot("learning", "held-out accuracy", "eval/accuracy",
         "Accuracy on problems that are not trained on, with 95 % intervals: reward that rises "
         "without it is not the task.", plot_accuracy, False),
    Plot("learning", "response length", "response/length_mean",
         "Mean tokens of a response: a line that climbs to rollout.max_new_tokens means that "
         "responses are cut.", line("response/length_mean")),
    Plot("learning", "log-prob gap, rollout to learner", "rollout/logprob_gap",
         "Mean distance between the log-probabilities of the same tokens in rollout and "
         "learner: a rounding error (10⁻⁶ in float32) unless the two differ.",
         line("rollout/logprob_gap")),
    Plot("learning", "loss", "loss",
         "The policy loss, which has no target of its own: look for jumps, not for a trend.",
         line("loss")),
    Plot("learning", "response lengths of all samples", LENGTHS,
         "A high bar at the right edge is responses cut at the limit; a long tail is rounds "
         "with few live rows, where drafts pay most.", plot_lengths, False, "tokens"),
    Plot("time", "share of each step's time", "time/step",
         "A column is a step; speculation shortens only the part of rollouts, so that part is "
         "the most that it can save.", plot_shares),
)
