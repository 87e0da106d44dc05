"""Draws docs/headline.png: speculative against plain RL steps that generate the same tokens.

    python docs/headline.py

Reads experiments/results/staleness_smollm2_turns.json, whose arms took turns step by step.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "experiments" / "results" / "staleness_smollm2_turns.json"
PICTURE = ROOT / "docs" / "headline.png"
ARMS = {"plain": "plain decoding", "frozen": "speculative"}
COLORS = {"plain": "#9aa5b1", "frozen": "#2166ac"}


def main() -> None:
    result = json.loads(RESULT.read_text())
    runs = {arm: result["cases"]["0"][arm] for arm in ARMS}
    assert all(run["tokens_equal"] for run in runs.values()), "the arms generated other tokens"
    figure, (bars, curve) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(3, 2))
    draw_seconds(bars, runs)
    draw_rewards(curve, runs)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=150)
    print(f"wrote {PICTURE.relative_to(ROOT)}")


def draw_seconds(axes: plt.Axes, runs: dict[str, dict]) -> None:
    """Seconds of all rollouts and of all steps, with the speed-up over plain decoding."""
    for row, (title, field) in enumerate((("rollouts", "rollout_seconds"),
                                          ("whole steps", "seconds"))):
        total = {arm: float(np.sum(run[field])) for arm, run in runs.items()}
        for offset, arm in enumerate(ARMS):
            place = row + 0.38 * offset
            axes.barh(place, total[arm], 0.34, color=COLORS[arm],
                      label=ARMS[arm] if row == 0 else None)
            ratio = "" if arm == "plain" else f", {total['plain'] / total[arm]:.2f}x"
            axes.text(total[arm] + 4, place, f"{total[arm]:.0f} s{ratio}", va="center", fontsize=9)
        axes.text(-6, row + 0.19, title, ha="right", va="center")
    steps = len(runs["plain"]["seconds"])
    axes.set(title=f"{steps} GRPO steps of SmolLM2-135M, 2 CPU cores", yticks=[],
             xlabel="seconds", xlim=(0, 345))
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_rewards(axes: plt.Axes, runs: dict[str, dict]) -> None:
    """Mean reward of each step against seconds since the first one began."""
    for arm, run in runs.items():
        axes.plot(np.cumsum(run["seconds"]), run["reward"], color=COLORS[arm], lw=2,
                  label=ARMS[arm])
    axes.set(title="same tokens, same rewards, sooner", xlabel="seconds", ylabel="mean reward")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
