"""report.html: one page about a run that needs no other file and no network."""

import base64
import collections
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specrl_jax.config import ConfigError
from specrl_jax.io.files import write_atomically
from specrl_jax.io.launches import recorded
from specrl_jax.io.metrics import (
    METRICS,
    REPORT,
    check_sample,
    flat,
    read_config,
    read_metrics,
    read_samples,
)

PAGE = Path(__file__).with_name("report_page.html")  # the template
RELIABILITY = "rollout/reliability"
REQUIRED = ("step", "reward/mean")
SHOWN = {"prompt_id": int, "sample_id": int, "prompt": str, "completion": str,
         "tokens": (list, int), "reward": (int, float)}  # of a sample
BLUE, YELLOW, GREEN, RED, GREY = "#4269d0", "#efb118", "#3ca951", "#ff725c", "#9c9c9c"
COLORS = {"rollout": BLUE, "reward": YELLOW, "learn": GREEN, "distill": "#a463f2", "other": GREY}
BINS, SAMPLES_SHOWN, TEXT_SHOWN = 40, 8, 1200

Rows = Sequence[Mapping[str, Any]]
Draw = Callable[..., None]  # of axes and rows


class Samples(NamedTuple):
    """What a report shows of samples.jsonl."""

    lengths: collections.Counter[int]  # how many responses have each length
    last: Rows  # those of the last step


def write_report(workdir: str | Path) -> Path:
    """Writes report.html from the files of a run, finished or not, and returns its path.

    Raises:
      ConfigError: no step is recorded, or a metric of REQUIRED is missing.
    """
    workdir = Path(workdir)
    rows = read_metrics(workdir)
    if not rows:
        raise ConfigError(f"{workdir / METRICS}: no steps: run at least one first")
    for row in rows:
        for key in REQUIRED:
            if key not in row:
                raise ConfigError(f"{workdir / METRICS}: {key!r} is missing in step {row['step']}: "
                                  f"a report needs {', '.join(REQUIRED)}")
    samples = summarize(workdir)
    config = read_config(workdir) or {}
    figures, missing = _figures(rows, samples)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    html = template.from_string(PAGE.read_text(encoding="utf-8")).render(
        title=f"Run {config.get('name', workdir.name)}", totals=totals(rows, samples),
        figures=figures, missing=missing, samples=pick_samples(samples.last),
        config=sorted(flat(config).items()))
    write_atomically(workdir / REPORT, html)
    return workdir / REPORT


def summarize(workdir: Path) -> Samples:
    """Reads the samples of a run one by one: all of them may be gigabytes."""
    lengths, last = collections.Counter[int](), list[Mapping[str, Any]]()
    for sample in read_samples(workdir):
        check_sample(workdir, sample, SHOWN)
        if not sample.get("learned", True):
            continue
        lengths[token_count(sample)] += 1
        if last and last[0]["step"] != sample["step"]:
            last.clear()
        last.append(sample)
    return Samples(lengths, last)


def totals(rows: Rows, samples: Samples) -> list[tuple[str, str]]:
    """Returns the rows of the table at the top: sums and means over the run."""
    def finite(key: str) -> np.ndarray:
        values = column(rows, key)
        return values[np.isfinite(values)]

    def total(key: str) -> float:
        return float(finite(key).sum())

    def mean(key: str) -> float:
        return total(key) / max(len(finite(key)), 1)

    def last(key: str) -> float:
        return next(reversed(finite(key).tolist()), np.nan)

    reward, tenth = column(rows, "reward/mean"), max(len(rows) // 10, 1)
    out = [("steps", f"{len(rows)}"),
           (f"reward, first and last {tenth} steps",
            f"{np.mean(reward[:tenth]):.3f}, {np.mean(reward[-tenth:]):.3f}"),
           ("sequences", f"{samples.lengths.total()}"),
           ("tokens", f"{sum(n * count for n, count in samples.lengths.items()):,}")]
    profiled = total("time/profiling") / max(total("time/startup") + total("time/step"), 1e-9)
    lost = total("time/regret") / max(total("time/rollout"), 1e-9)
    optional = (  # shown if the run recorded the metric
        ("time in steps", "time/step", f"{total('time/step') / 60:.1f} min"),
        ("seconds of start-up", "time/profiling", f"{total('time/startup'):.0f}"),
        ("measuring what rounds cost, of start-up and steps", "time/profiling", f"{profiled:.1%}"),
        ("error of the predicted seconds of launches", "time/cost_error",
         f"{mean('time/cost_error'):.1%}"),
        ("held-out accuracy, best", "eval/accuracy",
         f"{max(finite('eval/accuracy'), default=0):.3f} after step {last('eval/best_step'):.0f}"),
        ("tokens/s, mean", "rollout/tokens_per_second",
         f"{mean('rollout/tokens_per_second'):.0f}"),
        ("accept length, mean", "rollout/accept_length", f"{mean('rollout/accept_length'):.2f}"),
        ("response length, mean", "response/length_mean", f"{mean('response/length_mean'):.1f}"),
        ("seconds saved by speculation, predicted", "time/saved", f"{total('time/saved'):.1f}"),
        ("seconds lost against plain decoding, of rollouts", "time/regret", f"{lost:.1%}"),
        ("seconds spent on the drafter", "time/distill", f"{total('time/distill'):.1f}"),
        ("saved less spent", "time/speculation_net", f"{last('time/speculation_net'):+.1f}"),
        ("faults of the drafter", "drafter/faults", f"{last('drafter/faults'):.0f}"),
        ("compilations, last step", "compilations", f"{last('compilations'):.0f}"))
    return out + [(name, text) for name, key, text in optional if len(finite(key))]


def token_count(sample: Mapping[str, Any]) -> int:
    """Returns the length of a response; samples.jsonl may hold token ids or their number."""
    return len(sample["tokens"]) if isinstance(sample["tokens"], list) else sample["tokens"]


def column(rows: Rows, key: str) -> np.ndarray:
    """Returns one metric of all steps, f64[steps]; NaN where it is absent. Raises ConfigError if it
    is no number."""
    values = [row.get(key, np.nan) for row in rows]
    for row, value in zip(rows, values, strict=True):
        if not isinstance(value, int | float):
            raise ConfigError(f"{METRICS}: {key} = {value!r} in step {row['step']}: is no number; "
                              f"restore the file from a copy")
    return np.array(values, dtype=float)


def pick_samples(last: Rows) -> Rows:
    """Returns a few shortened completions of the last step, alternately the best and the worst."""
    ranked = sorted(last, key=lambda s: (-s["reward"], s["sample_id"]))
    chosen = [ranked[i // 2] if i % 2 == 0 else ranked[-1 - i // 2] for i in range(len(ranked))]
    return [{**s} | {name: s[name] if len(s[name]) <= TEXT_SHOWN else s[name][:TEXT_SHOWN] + " ..."
                 for name in ("prompt", "completion")} for s in chosen[:SAMPLES_SHOWN]]


def _figures(rows: Rows, samples: Samples) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns (name, base64 SVG) of the figures, and (name, metric) of those that lack data."""
    def line(name: str, key: str) -> tuple[str, str, Draw]:
        return name, key, functools.partial(plot_line, key=key)

    plots = [
        ("reward", "reward/mean", plot_reward),
        line("tokens per second", "rollout/tokens_per_second"),
        line("accept length (tokens per round)", "rollout/accept_length"),
        ("share of each step's time", "time/step", plot_shares),
        line("response length", "response/length_mean"),
        line("log-prob gap, rollout to learner", "rollout/logprob_gap"),
        line("loss", "loss")]
    optional = [
        ("held-out accuracy", "eval/accuracy", plot_accuracy),
        ("draft depth and verified tokens over time", "control/draft_depth", plot_setting),
        ("seconds saved, spent and lost by the controller", "time/regret", plot_saved),
        ("seconds saved by speculation (estimated) less those spent on the drafter",
         "time/speculation_net", plot_net)]

    def recorded_in(plot: tuple[str, str, Draw]) -> bool:
        return bool(np.isfinite(column(rows, plot[1])).any())

    figures = [(name, draw_svg(name, "step", functools.partial(draw, rows=rows)))
               for name, _, draw in filter(recorded_in, [*plots, *optional])]
    missing = [(plot[0], plot[1]) for plot in plots if not recorded_in(plot)]
    if any(row.get(RELIABILITY) for row in rows):
        figures.append(("reliability", draw_svg(
            "how often drafts were accepted, all steps", "estimate",
            functools.partial(plot_reliability, rows=rows))))
    if samples.lengths:
        draw = functools.partial(plot_lengths, lengths=samples.lengths)
        figures.append(("histogram", draw_svg("response lengths of all samples", "tokens", draw)))
    return figures, missing


def draw_svg(title: str, xlabel: str, draw: Callable[[Axes], None]) -> str:
    """Returns one figure as base64 of SVG. It avoids pyplot, which keeps global state."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    ax = figure.subplots()
    draw(ax)
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_xlabel(xlabel)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[0] and ax.get_legend() is None:
        ax.legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def plot_accuracy(ax: Axes, rows: Rows) -> None:
    """Draws the evaluations of a run with their 95 % intervals."""
    told = [row for row in rows if "eval/accuracy" in row]
    plot_line(ax, told, "eval/accuracy")
    ax.fill_between(column(told, "step"), column(told, "eval/accuracy_low"),
                    column(told, "eval/accuracy_high"), color=BLUE, alpha=0.2, linewidth=0)


def plot_line(ax: Axes, rows: Rows, key: str) -> None:
    """Plots one metric over steps."""
    marker = "." if len(rows) <= 50 else ""
    ax.plot(column(rows, "step"), column(rows, key), color=BLUE, marker=marker)
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.grid(alpha=0.25)


def plot_reward(ax: Axes, rows: Rows) -> None:
    """Plots the mean reward over steps, with one standard deviation of a step's rewards."""
    mean, std = column(rows, "reward/mean"), column(rows, "reward/std")
    plot_line(ax, rows, "reward/mean")
    if np.isfinite(std).any():
        ax.fill_between(column(rows, "step"), mean - std, mean + std, color=BLUE, alpha=0.2,
                        linewidth=0, label="one standard deviation of the step's samples")


def shares(rows: Rows) -> dict[str, np.ndarray]:
    """Returns each phase's share of a step's seconds, f64[steps]; the rest is "other"."""
    total = column(rows, "time/step")
    parts = {name: np.nan_to_num(column(rows, f"time/{name}") / total)
             for name in COLORS if name != "other"}
    return parts | {"other": np.clip(1 - sum(parts.values()), 0, None)}


def plot_shares(ax: Axes, rows: Rows) -> None:
    """Plots the shares of the phases as one stacked bar a step."""
    steps, bottom = column(rows, "step"), np.zeros(len(rows))
    edges = np.append(steps, steps[-1] + 1) - 0.5
    for name, share in shares(rows).items():
        ax.stairs(bottom + share, edges, baseline=bottom, fill=True, color=COLORS[name],
                  label=name)
        bottom = bottom + share
    ax.set_ylim(0, 1)
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def plot_setting(ax: Axes, rows: Rows) -> None:
    """Plots draft depth and verified tokens of each launch, or of each step."""
    time, depth, width = [], [], []
    for row in rows:
        launches = recorded(row) or [{"draft_depth": row.get("control/draft_depth", np.nan)}]
        time += [row["step"] + i / len(launches) for i in range(len(launches))]
        depth += [launch["draft_depth"] for launch in launches]
        width += [launch.get("verify_tokens", np.nan) / launch.get("batch", 1)
                  for launch in launches]
    ax.step(time, depth, where="post", color=BLUE, linewidth=0.8, label="draft depth")
    ax.step(time, width, where="post", color=YELLOW, linewidth=0.8, label="verified tokens a slot")
    ax.set_ylim(bottom=0)


def plot_saved(ax: Axes, rows: Rows) -> None:
    """Plots running sums of the seconds that the controller saved, spent and lost."""
    _plot_sums(ax, rows, [(name, np.nancumsum(column(rows, f"time/{name}")), color) for name, color
                          in (("saved", GREEN), ("spent", YELLOW), ("regret", RED))])


def plot_net(ax: Axes, rows: Rows) -> None:
    """Plots running sums of seconds saved by speculation and spent on the drafter."""
    spent = np.nancumsum(column(rows, "time/distill"))
    net = column(rows, "time/speculation_net")
    _plot_sums(ax, rows, [("saved", net + spent, GREEN), ("spent", spent, YELLOW),
                          ("saved less spent", net, BLUE)])
    ax.axhline(0, color=GREY, linewidth=0.8)


def _plot_sums(ax: Axes, rows: Rows, lines: Sequence[tuple[str, np.ndarray, str]]) -> None:
    for name, values, color in lines:
        ax.plot(column(rows, "step"), values, color=color, label=name)
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


def plot_lengths(ax: Axes, lengths: Mapping[int, int]) -> None:
    """Plots a histogram of response lengths, given how many responses have each."""
    bins = min(BINS, max(lengths) - min(lengths) + 1)
    ax.hist(list(lengths), bins=bins, weights=list(lengths.values()), color=BLUE)
    ax.set_ylabel("samples")
