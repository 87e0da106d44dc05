"""report.html: one page about a run that needs no other file and no network."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specrl_jax.config import ConfigError
from specrl_jax.io.launches import recorded
from specrl_jax.io.metrics import (
    METRICS,
    SAMPLES,
    read_config,
    read_metrics,
    read_samples,
    write_atomically,
)

REPORT = "report.html"
RELIABILITY = "rollout/reliability"
REQUIRED = ("step", "reward/mean")
REQUIRED_OF_SAMPLES = ("prompt_id", "sample_id", "prompt", "completion", "tokens", "reward")
PHASES = ("rollout", "reward", "learn", "distill")
COLORS = {"rollout": "#4269d0", "reward": "#efb118", "learn": "#3ca951", "distill": "#a463f2",
          "other": "#9c9c9c"}
LINE, BAND = "#4269d0", "#4269d033"
BINS = 40
SAMPLES_SHOWN = 8
TEXT_SHOWN = 1200

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto;
       padding: 0 1em; }
h1, h2 { line-height: 1.2; font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1em; }
figure { margin: 0; } figure img { width: 100%; }
table { border-collapse: collapse; } td { padding: .15em 1.5em .15em 0; vertical-align: top; }
td:last-child { font-variant-numeric: tabular-nums; }
.config { columns: 2 380px; } .config td { font-size: 13px; overflow-wrap: anywhere; }
.sample { border-top: 1px solid #ddd; padding: .6em 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2em 0; font-size: 13px; }
.prompt { color: #777; } .missing { color: #777; }
</style></head><body>
<h1>{{ title }}</h1>
<table>{% for name, value in totals %}
<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>Curves</h2>
<div class="figures">{% for name, image in figures %}
<figure><img alt="{{ name }}" src="data:image/svg+xml;base64,{{ image }}"></figure>{% endfor %}
</div>
{% for name, key in missing %}<p class="missing">No figure of {{ name }}: the run recorded no
<code>{{ key }}</code>.</p>{% endfor %}
<h2>Samples</h2>
{% for s in samples %}<div class="sample">step {{ s.step }}, prompt {{ s.prompt_id }},
sample {{ s.sample_id }}: reward <b>{{ "%.3g" | format(s.reward) }}</b>
<pre class="prompt">{{ s.prompt }}</pre><pre>{{ s.completion }}</pre></div>
{% else %}<p class="missing">The run recorded no samples.</p>{% endfor %}
<h2>Configuration</h2>
<div class="config"><table>{% for name, value in config %}
<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table></div>
</body></html>
"""

Rows = Sequence[Mapping[str, Any]]


def write_report(workdir: str | Path) -> Path:
    """Writes report.html from the files of a run, finished or not, and returns its path.

    Raises:
      ConfigError: no step is recorded, or a metric of REQUIRED is missing.
    """
    workdir = Path(workdir)
    rows = read_metrics(workdir)
    samples = list(read_samples(workdir))
    if not rows:
        raise ConfigError(f"{workdir / METRICS}: no steps: run at least one first")
    _check(workdir / METRICS, rows, REQUIRED)
    _check(workdir / SAMPLES, samples, REQUIRED_OF_SAMPLES)
    config = read_config(workdir) or {}
    figures, missing = _figures(rows, samples)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    html = template.from_string(PAGE).render(
        title=f"Run {config.get('name', workdir.name)}", totals=totals(rows, samples),
        figures=figures, missing=missing, samples=pick_samples(samples),
        config=sorted(_flat_text(config)))
    write_atomically(workdir / REPORT, [html])
    return workdir / REPORT


def _check(path: Path, rows: Rows, required: tuple[str, ...]) -> None:
    for row in rows:
        for key in required:
            if key not in row:
                raise ConfigError(f"{path}: {key!r} is missing in step {row['step']}: "
                                  f"a report needs {', '.join(required)}")


def totals(rows: Rows, samples: Rows) -> list[tuple[str, str]]:
    """Returns the rows of the table at the top: sums and means over the run."""
    reward = column(rows, "reward/mean")
    tenth = max(len(rows) // 10, 1)
    seconds = column(rows, "time/step")
    out = [("steps", f"{len(rows)}"),
           (f"reward, first and last {tenth} steps",
            f"{np.mean(reward[:tenth]):.3f}, {np.mean(reward[-tenth:]):.3f}"),
           ("sequences", f"{len(samples)}"), ("tokens", f"{sum(map(token_count, samples)):,}")]
    if np.isfinite(seconds).any():
        out.append(("time in steps", f"{np.nansum(seconds) / 60:.1f} min"))
    if np.isfinite(profiling := column(rows, "time/profiling")).any():
        starts = np.nansum(column(rows, "time/startup"))
        share = np.nansum(profiling) / max(starts + np.nansum(seconds), 1e-9)
        out += [("seconds of start-up", f"{starts:.0f}"),
                ("measuring what rounds cost, of start-up and steps", f"{share:.1%}")]
    if np.isfinite(error := column(rows, "time/cost_error")).any():
        out.append(("error of the predicted seconds of launches", f"{np.nanmean(error):.1%}"))
    for name, key, form in (("tokens/s, mean", "rollout/tokens_per_second", "{:.0f}"),
                            ("accept length, mean", "rollout/accept_length", "{:.2f}"),
                            ("response length, mean", "response/length_mean", "{:.1f}")):
        if np.isfinite(values := column(rows, key)).any():
            out.append((name, form.format(np.nanmean(values))))
    if np.isfinite(saved := column(rows, "time/saved")).any():
        out.append(("seconds saved by speculation, predicted", f"{np.nansum(saved):.1f}"))
    if np.isfinite(lost := column(rows, "time/regret")).any():
        took = max(np.nansum(column(rows, "time/rollout")), 1e-9)
        out.append(("seconds lost against plain decoding, of rollouts",
                    f"{np.nansum(lost) / took:.1%}"))
    if np.isfinite(spent := column(rows, "time/distill")).any():
        out.append(("seconds spent on the drafter", f"{np.nansum(spent):.1f}"))
        out.append(("saved less spent", f"{column(rows, 'time/speculation_net')[-1]:+.1f}"))
    if np.isfinite(faults := column(rows, "drafter/faults")).any():
        out.append(("faults of the drafter", f"{faults[-1]:.0f}"))
    if np.isfinite(compiled := column(rows, "compilations")).any():
        out.append(("compilations, last step", f"{compiled[-1]:.0f}"))
    return out


def token_count(sample: Mapping[str, Any]) -> int:
    """Returns the length of a response; samples.jsonl may hold token ids or their number."""
    return len(sample["tokens"]) if isinstance(sample["tokens"], list) else sample["tokens"]


def column(rows: Rows, key: str) -> np.ndarray:
    """Returns one metric of all steps, f64[steps]; NaN where it is absent."""
    return np.array([row.get(key, np.nan) for row in rows], dtype=float)


def pick_samples(samples: Rows) -> Rows:
    """Returns a few shortened completions of the last step, alternately the best and the worst."""
    last = [s for s in samples if s["step"] == samples[-1]["step"]] if samples else []
    ranked = sorted(last, key=lambda s: (-s["reward"], s["sample_id"]))
    chosen = [ranked[i // 2] if i % 2 == 0 else ranked[-1 - i // 2] for i in range(len(ranked))]
    return [{**s} | {name: s[name] if len(s[name]) <= TEXT_SHOWN else s[name][:TEXT_SHOWN] + " ..."
                 for name in ("prompt", "completion")} for s in chosen[:SAMPLES_SHOWN]]


def _flat_text(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for name, value in tree.items():
        out += _flat_text(value, f"{prefix}{name}.") if isinstance(value, dict) else [
            (prefix + name, str(value))]
    return out


def _figures(rows: Rows, samples: Rows) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns (name, base64 SVG) of the figures, and (name, metric) of those that lack data."""
    plots: list[tuple[str, str, Callable[[Axes], None]]] = [
        ("reward", "reward/mean", lambda ax: plot_reward(ax, rows)),
        ("tokens per second", "rollout/tokens_per_second",
         lambda ax: plot_line(ax, rows, "rollout/tokens_per_second")),
        ("accept length (tokens per round)", "rollout/accept_length",
         lambda ax: plot_line(ax, rows, "rollout/accept_length")),
        ("share of each step's time", "time/step", lambda ax: plot_shares(ax, rows)),
        ("response length", "response/length_mean",
         lambda ax: plot_line(ax, rows, "response/length_mean")),
        ("log-prob gap, rollout to learner", "rollout/logprob_gap",
         lambda ax: plot_line(ax, rows, "rollout/logprob_gap")),
        ("loss", "loss", lambda ax: plot_line(ax, rows, "loss")),
    ]
    if any("control/draft_depth" in row for row in rows):
        plots += [("draft depth and verified tokens over time", "control/draft_depth",
                   lambda ax: plot_setting(ax, rows)),
                  ("seconds saved, spent and lost by the controller", "time/saved",
                   lambda ax: plot_saved(ax, rows))]
    if any("time/speculation_net" in row for row in rows):
        plots.append(("seconds saved by speculation (estimated) less those spent on the drafter",
                      "time/speculation_net", lambda ax: plot_net(ax, rows)))
    drawable = [p for p in plots if np.isfinite(column(rows, p[1])).any()]
    figures = [(name, draw_svg(name, "step", draw)) for name, _, draw in drawable]
    missing = [(name, key) for name, key, _ in plots if (name, key) not in
               [(n, k) for n, k, _ in drawable]]
    if any(row.get(RELIABILITY) for row in rows):
        figures.append(("reliability", draw_svg(
            "how often drafts were accepted, all steps", "estimate",
            lambda ax: plot_reliability(ax, rows))))
    if samples:
        figures.append(("histogram", draw_svg("response lengths of all samples", "tokens",
                                              lambda ax: plot_lengths(ax, samples))))
    return figures, missing


def draw_svg(title: str, xlabel: str, draw: Callable[[Axes], None]) -> str:
    """Returns one figure as base64 of SVG. It avoids pyplot, which keeps global state."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    ax = figure.subplots()
    draw(ax)
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_xlabel(xlabel)
    ax.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _marker(rows: Rows) -> str:
    return "." if len(rows) <= 50 else ""


def plot_line(ax: Axes, rows: Rows, key: str) -> None:
    """Plots one metric over steps."""
    ax.plot(column(rows, "step"), column(rows, key), color=LINE, marker=_marker(rows))
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.grid(alpha=0.25)


def plot_reward(ax: Axes, rows: Rows) -> None:
    """Plots the mean reward over steps, with one standard deviation of a step's rewards."""
    mean, std = column(rows, "reward/mean"), column(rows, "reward/std")
    plot_line(ax, rows, "reward/mean")
    if np.isfinite(std).any():
        ax.fill_between(column(rows, "step"), mean - std, mean + std, color=BAND, linewidth=0,
                        label="one standard deviation of the step's samples")
        ax.legend(frameon=False, fontsize=8)


def shares(rows: Rows) -> dict[str, np.ndarray]:
    """Returns each phase's share of a step's seconds, f64[steps]; the rest is "other"."""
    total = column(rows, "time/step")
    parts = {name: np.nan_to_num(column(rows, f"time/{name}") / total) for name in PHASES}
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
    """Plots draft depth and packed tokens of each launch, or of each step."""
    place, depth, width = [], [], []
    for row in rows:
        launches = recorded(row) or [{"draft_depth": row.get("control/draft_depth", np.nan)}]
        place += [row["step"] + i / len(launches) for i in range(len(launches))]
        depth += [launch["draft_depth"] for launch in launches]
        width += [launch.get("verify_tokens", np.nan) / launch.get("batch", 1)
                  for launch in launches]
    ax.step(place, depth, where="post", color=LINE, linewidth=0.8, label="draft depth")
    ax.step(place, width, where="post", color="#efb118", linewidth=0.8,
            label="verified tokens a slot")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=8)


def plot_saved(ax: Axes, rows: Rows) -> None:
    """Plots running sums of the seconds that the controller saved, spent and lost."""
    for name, key, color in (("saved", "time/saved", "#3ca951"), ("spent", "time/spent", "#efb118"),
                             ("regret", "time/regret", "#ff725c")):
        ax.plot(column(rows, "step"), np.nancumsum(column(rows, key)), color=color, label=name)
    ax.set_ylabel("seconds, summed")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, fontsize=8)


def plot_net(ax: Axes, rows: Rows) -> None:
    """Plots running sums of seconds saved by speculation and spent on the drafter."""
    spent = np.nancumsum(column(rows, "time/distill"))
    net = column(rows, "time/speculation_net")
    for name, values, color in (("saved", net + spent, "#3ca951"), ("spent", spent, "#efb118"),
                                ("saved less spent", net, LINE)):
        ax.plot(column(rows, "step"), values, color=color, label=name)
    ax.axhline(0, color="#9c9c9c", linewidth=0.8)
    ax.set_ylabel("seconds, summed")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, fontsize=8)


def plot_reliability(ax: Axes, rows: Rows) -> None:
    """Plots accepted share over estimated acceptance, in tenths of the estimate, over all steps."""
    tried, estimate, accepted = np.concatenate(
        [np.reshape(row.get(RELIABILITY, []), (-1, 3)) for row in rows]).T
    tenth = np.minimum((10 * estimate).astype(int), 9)
    count, x, y = (np.bincount(tenth, tried * a, 10) for a in (1.0, estimate, accepted))
    seen = count > 0
    ax.plot([0, 1], [0, 1], color="#9c9c9c", linewidth=0.8)
    ax.scatter(x[seen] / count[seen], y[seen] / count[seen], color=LINE,
               s=10 + 90 * count[seen] / count.max())
    ax.set_ylabel("accepted share")


def plot_lengths(ax: Axes, samples: Rows) -> None:
    """Plots a histogram of response lengths."""
    lengths = [token_count(sample) for sample in samples]
    bins = min(BINS, max(lengths) - min(lengths) + 1)
    ax.hist(lengths, bins=bins, color=LINE)
    ax.set_ylabel("samples")
