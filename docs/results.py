"""Draws the pictures of docs/findings.md and of docs/guides/when_it_pays.md from
experiments/results.

    python docs/results.py

Nothing is measured here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

IMAGES = Path(__file__).resolve().parent / "images"
RESULTS = IMAGES.parents[1] / "experiments" / "results"
STYLE = {"svg.hashsalt": "specrl_jax", "svg.fonttype": "none", "font.size": 11,
         "font.family": "sans-serif", "axes.titlesize": 11, "figure.facecolor": "#f6f7f9",
         "axes.facecolor": "#f6f7f9", "axes.spines.top": False,
         "axes.spines.right": False, "legend.frameon": False}
BLUE, LIGHT, GREY, ORANGE, GREEN, PURPLE = (
    "#2166ac", "#67a3d4", "#8a94a0", "#c2571a", "#3b8a4d", "#7a4fa3")
COLORS = (BLUE, ORANGE, GREEN, PURPLE, LIGHT, "#b59a1d", "#3a3a3a")
ROWS = (1, 2, 4, 8, 16, 32, 64)
# ReSpec's Fig. 7 (arXiv 2510.26475): the settings depth, branching, verified tokens.
PAPER = {"3x8x8": (1.191, 1.273, 1.156, 1.255, 1.383, 1.113, 0.837),
         "5x8x32": (1.411, 1.464, 1.246, 1.135, 1.129, 0.755, 0.448)}
# Its Fig. 15: synchronous training, then asynchronous at an interval of 1, 3 and 5 steps.
INTERVALS = {"3B": (0.50, 0.60, 0.50, 0.40), "7B": (0.32, 0.42, 0.35, 0.30),
             "14B": (0.60, 0.60, 0.50, 0.45)}


def main() -> None:
    for name, draw in PICTURES.items():
        save(draw, IMAGES / f"{name}.svg")
        print(f"wrote docs/images/{name}.svg")


def save(draw: Callable[[plt.Figure], None], path: Path) -> None:
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(9, 3.6), layout="constrained")
        draw(figure)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def curves(result: Mapping[str, Any], arm: str, field: str) -> np.ndarray:
    """Returns f64[seeds, steps]."""
    return np.array([case[arm][field] for case in result["cases"].values()])


def smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
    """Returns running means over `width` steps, f64[seeds, steps - width + 1]."""
    kernel = np.ones(width) / width
    return np.stack([np.convolve(row, kernel, "valid") for row in values])


def band(axes: plt.Axes, values: np.ndarray, label: str, color: str, style: str = "-") -> None:
    """The mean over seeds, smoothed, and its 95 % interval."""
    values = smooth(values)
    steps = np.arange(values.shape[1]) + 3
    mean, error = values.mean(0), values.std(0, ddof=1) / np.sqrt(len(values)) * T_5
    axes.plot(steps, mean, style, color=color, label=label, lw=1.8)
    axes.fill_between(steps, mean - error, mean + error, color=color, alpha=0.12, lw=0)


T_5 = 2.776  # Student's t for 95 % and five seeds


def gain(figure: plt.Figure) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for color, (setting, speed) in zip((LIGHT, ORANGE), PAPER.items(), strict=True):
        left.plot(ROWS, speed, "o-", color=color, label=setting)
    ours = read("bench_speculation_budget_cpu")["cases"]
    for color, (arm, label) in zip((LIGHT, ORANGE, BLUE), {
            "eagle 2x1x3": "2x1x3", "eagle 4x2x8": "4x2x8", "eagle budget": "budget"}.items(),
            strict=True):
        spread = [ours[str(rows)]["arms"][arm]["speedup"] for rows in ROWS]
        right.plot(ROWS, [s["median"] for s in spread], "o-", color=color, label=label)
        right.fill_between(ROWS, [s["min"] for s in spread], [s["max"] for s in spread],
                           color=color, alpha=0.15, lw=0)
    for axes, title in ((left, "ReSpec, Fig. 7: 7B on an H100"),
                        (right, "here: SmolLM2-135M on two CPU cores")):
        axes.axhline(1, color=GREY, lw=1, ls="--")
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="rows", xticks=ROWS, xticklabels=ROWS, ylim=(0, 2.1))
        axes.legend(fontsize=10)
    left.set_ylabel("speed over plain decoding")


def staleness(figure: plt.Figure) -> None:
    paper, left, right = figure.subplots(1, 3, width_ratios=(3, 4, 3))
    paper.plot((0, 40), (3.8, 3.8), color=ORANGE, lw=1.8)
    paper.plot((40, 75), (3.8, 2.5), ":", color=ORANGE, lw=1.8)
    paper.fill_between((75, 100), 2, 3, color=ORANGE, alpha=0.3, lw=0)
    paper.set(title="ReSpec, Fig. 4, read off", xlabel="RL step", ylabel="accept length",
              ylim=(1, 4.2))
    result = read("staleness_modes")
    for color, (arm, label) in zip(COLORS, {
            "frozen": "frozen", "every_step": "trained every step", "every_5": "every 5 steps",
            "once": "once, before RL"}.items(), strict=False):
        band(left, curves(result, arm, "acceptance"), label, color)
    band(right, curves(result, "plain", "reward"), "all arms, same tokens", GREY)
    left.set(title="here: acceptance rate", xlabel="RL step", ylim=(0, 1))
    right.set(title="here: mean reward", xlabel="RL step", ylim=(0, 1.05))
    left.legend(fontsize=9, loc="upper left")
    right.legend(fontsize=9, loc="lower right")


def bugs(figure: plt.Figure) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    result = read("staleness_bugs")
    exact = {"plain": "plain decoding", "frozen": "match rule (the same curve)",
             "rejection": "rejection sampling"}
    broken = {"lossy_greedy": "greedy", "lossy_default_sampling": "default sampling settings",
              "lossy_accept_all": "accepts everything", "lossy_shared_noise": "shared noise",
              "lossy_retrospective": "retrospective truncation"}
    for axes, arms, title in ((left, exact, "exact verification"),
                              (right, broken, "deliberate bugs")):
        for color, (arm, label) in zip(COLORS, arms.items(), strict=False):
            style = "--" if arm == "frozen" else "-"
            band(axes, curves(result, arm, "reward"), label, color, style)
        axes.set(title=title, xlabel="RL step", ylim=(0, 1.05))
    left.set_ylabel("mean reward")
    left.legend(fontsize=9, loc="lower right")
    right.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))


def differences(axes: plt.Axes, result: Mapping[str, Any], base: str, arms: Mapping[str, str],
                title: str) -> None:
    """Mean acceptance of arms less that of `base`, paired by seed, with 95 % intervals."""
    reference = curves(result, base, "acceptance").mean(1)
    for i, arm in enumerate(arms):
        paired = curves(result, arm, "acceptance").mean(1) - reference
        mean, error = paired.mean(), paired.std(ddof=1) / np.sqrt(len(paired)) * T_5
        dot(axes, i, (mean, mean - error, mean + error), BLUE)
    by_name(axes, list(arms.values()), 0)
    axes.set(title=title, xlabel="difference of acceptance")
    axes.locator_params(axis="x", nbins=5)


def losses(figure: plt.Figure) -> None:
    left, right, paper = figure.subplots(1, 3)
    differences(left, read("staleness_losses"), "forward_kl", {
        "reward_weighted_kl": "KL by reward\n(ReSpec)",
        "advantage_weighted_kl": "KL by\nadvantage", "e2e_tv": "end-to-end TV", "lk": "LK",
        "tv": "TV", "jsd": "JSD"}, "against forward KL")
    differences(right, read("staleness_intervals"), "every_1", {
        "late_1": "every step,\nlate", "every_3": "every 3",
        "every_5": "every 5", "late_5": "every 5,\nlate"}, "against every step")
    for (size, accuracy), color in zip(INTERVALS.items(), COLORS, strict=False):
        paper.plot(("sync", "1", "3", "5"), accuracy, "o-", color=color, label=size)
    paper.set(title="ReSpec, Fig. 15", xlabel="interval, asynchronous",
              ylabel="validation accuracy", ylim=(0, 0.85))
    paper.legend(fontsize=9, loc="upper center", ncols=3, columnspacing=1)


def steps(figure: plt.Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    runs = read("staleness_smollm2_turns")["cases"]["0"]
    arms = {"plain": "plain", "frozen": "frozen head", "every_5": "trained every 5 steps"}
    for i, arm in enumerate(arms):
        rollout, whole = (float(np.sum(runs[arm][f])) for f in ("rollout_seconds", "seconds"))
        for start, width, color, part in ((0, rollout, BLUE, "rollouts"),
                                          (rollout, whole - rollout, GREY, "the rest")):
            bar = left.barh(i, width, left=start, color=color)
            left.bar_label(bar, [part], label_type="center", color="white")
        ratio = float(np.sum(runs["plain"]["seconds"])) / whole
        left.text(whole + 4, i, f"{ratio:.2f}x", va="center")
    left.set(title="30 GRPO steps of SmolLM2-135M, one row", xlabel="seconds", xlim=(0, 320),
             yticks=range(len(arms)), yticklabels=arms.values())
    left.invert_yaxis()
    paper = {"3B": 1.84, "7B": 1.69, "14B": 1.50}
    right.bar(list(paper), list(paper.values()), color=LIGHT, width=0.6)
    for i, speed in enumerate(paper.values()):
        right.text(i, speed + 0.04, f"{speed:.2f}x", ha="center")
    right.set(title="ReSpec, Fig. 13, on H100s", ylabel="speed of a step", ylim=(0, 2.1))
    right.axhline(1, color=GREY, lw=1, ls="--")


def controller(figure: plt.Figure) -> None:
    left, right = figure.subplots(1, 2, sharex=True)
    cases = {left: {"small": ""},
             right: {"smollm2_arithmetic": ", good head", "smollm2": ", weaker head"}}
    for axes, files in cases.items():
        labels = []
        for file, suffix in files.items():
            summary = read(f"bench_controller_{file}")["summary"]
            for policy, color in (("budget", BLUE), ("respec", ORANGE), ("bandit", GREY)):
                found = summary[policy]
                dot(axes, len(labels), (found["ratio"], found["low"], found["high"]), color)
                labels.append(policy + suffix)
        by_name(axes, labels, 1)
        axes.set_xlabel("speed over the best fixed setting")
    left.set_title("small model, 48 cells")
    right.set_title("SmolLM2-135M, eight cells per head")


def algorithms(figure: plt.Figure) -> None:
    left, right = figure.subplots(1, 2, sharex=True)
    cases = read("bench_algorithms_smollm2")["cases"]
    seeds = {"seed 0": "grpo", "seed 1": "grpo_seed_1", "seed 2": "grpo_seed_2"}
    named = [name for name in cases if name not in (*seeds.values(), *TASKS)]
    for i, name in enumerate(named):
        dot(left, i, accuracy(cases[name]), BLUE)
    by_name(left, named)
    spread = [accuracy(cases[name]) for name in seeds.values()]
    own = [(case["greedy"]["after"], *case["greedy"]["after_interval_wilson"])
           for case in read("smollm2_seeds_cpu")["seeds"].values()]
    for i, values in enumerate([*spread, *own]):
        dot(right, i, values, ORANGE if i < len(spread) else GREEN)
    by_name(right, [f"{name}, {seed}" for name in ("grpo", "presets' own") for seed in seeds])
    for axes, title in ((left, "one seed each"),
                        (right, "three seeds; those of grpo are shaded")):
        axes.axvspan(min(x[0] for x in spread), max(x[0] for x in spread), color=ORANGE,
                     alpha=0.12, lw=0)
        axes.set(title=title, xlabel="held-out accuracy")


TASKS = ("chain_sum", "spell_backward")  # of the algorithms' result, with accuracies near 0


def accuracy(case: Mapping[str, Any]) -> tuple[float, float, float]:
    return case["accuracy"], case["accuracy_low"], case["accuracy_high"]


def compilers(figure: plt.Figure) -> None:
    axes = figure.subplots()
    compiled = [json.loads(path.read_text(encoding="utf-8"))
                for path in sorted(RESULTS.glob("compile_*.json"))
                if not path.stem.endswith("_newest")]
    for i, result in enumerate(compiled):
        launch, update = (filled(result, name) for name in ("launch", "update"))
        axes.plot((launch, update), (i, i), color=GREY, lw=1)
        for value, color, label in ((launch, BLUE, "largest launch"),
                                    (update, ORANGE, "policy update")):
            axes.plot(value, i, "o", color=color, label=None if i else label)
    by_name(axes, [f"{r['config']['name']}, {r['target']}" for r in compiled], 1)
    axes.set(xlabel="memory that a program needs with what is resident, of the limit",
             xlim=(0, 1.05))
    axes.legend(fontsize=10, loc="center right")


def filled(result: Mapping[str, Any], name: str) -> float:
    """Returns the share of the memory limit that the first program of this name fills."""
    program = next(p for p in result["programs"] if p["program"].split()[0] == name)
    return (program["peak"] + sum(program["resident"].values())) / program["limit"]


def dot(axes: plt.Axes, row: int, values: tuple[float, float, float], color: str) -> None:
    """A mean with its interval."""
    mean, low, high = values
    axes.errorbar(mean, row, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3)


def by_name(axes: plt.Axes, names: Sequence[str], line: float | None = None) -> None:
    """Names rows from above, and marks a value."""
    axes.set(yticks=range(len(names)), yticklabels=names)
    axes.tick_params(axis="y", labelsize=10)
    axes.invert_yaxis()
    if line is not None:
        axes.axvline(line, color=GREY, lw=1, ls="--")


def pays(figure: plt.Figure) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (name, case) in zip(axes, read("when_it_pays")["cases"].items(), strict=True):
        lengths = case["accept_length"]
        for color, (label, by_rows) in zip((LIGHT, BLUE, ORANGE, PURPLE), lengths.items(),
                                           strict=True):
            ax.plot([int(rows) for rows in by_rows], list(by_rows.values()), "o-", color=color,
                    label=label)
        ax.axvspan(20, 43, color=GREY, alpha=0.2, lw=0)
        ax.set_xscale("log", base=2)
        ticks = [int(rows) for rows in by_rows]
        ax.set(title=name, xlabel="rows", xticks=ticks, xticklabels=ticks)
    axes[0].set_ylabel("accept length to pay")
    axes[0].set_ylim(bottom=1)
    axes[0].legend(fontsize=9)


PICTURES = {"finding_gain": gain, "finding_staleness": staleness, "finding_bugs": bugs,
            "finding_losses": losses, "finding_steps": steps, "finding_controller": controller,
            "finding_algorithms": algorithms, "finding_compilers": compilers,
            "when_it_pays": pays}

if __name__ == "__main__":
    main()
