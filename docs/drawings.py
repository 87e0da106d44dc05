"""Draws docs/images/*.svg, the drawings of docs/concepts.md and docs/architecture.md.

    python docs/drawings.py
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

IMAGES = Path(__file__).resolve().parent / "images"
INK, SOFT, PAPER = "#1f2933", "#9aa5b1", "#f6f7f9"  # text, what is left out, background
BLUE, PALE, ORANGE = "#2166ac", "#d6e4f2", "#c2571a"  # what counts, boxes, what is refused
STYLE = {"svg.hashsalt": "specrl_jax", "svg.fonttype": "none", "font.size": 11,
         "font.family": "sans-serif", "text.color": INK, "figure.facecolor": PAPER}


def main() -> None:
    for name, draw in DRAWINGS.items():
        save(draw, IMAGES / f"{name}.svg")
        print(f"wrote docs/images/{name}.svg")


def save(draw: Callable[[plt.Axes], None], path: Path) -> None:
    """Writes one drawing; its axes are as many units wide and high as `draw` sets limits."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 3))
        axes.set_axis_off()
        draw(axes)
        width, height = np.ptp(axes.get_xlim()), np.ptp(axes.get_ylim())
        figure.set_size_inches(9, 9 * height / width)
        figure.subplots_adjust(0, 0, 1, 1)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def limits(axes: plt.Axes, width: float, height: float) -> None:
    axes.set(xlim=(0, width), ylim=(0, height))


def box(axes: plt.Axes, x: float, y: float, text: str, w: float = 1.7, h: float = 0.8,
        edge: str = BLUE, face: str = PALE, style: str = "-") -> None:
    """A rounded box with its centre at (x, y)."""
    axes.add_patch(matplotlib.patches.FancyBboxPatch(
        (x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.12", ec=edge, fc=face,
        ls=style, lw=1.5))
    axes.text(x, y, text, ha="center", va="center", linespacing=1.3)


def arrow(axes: plt.Axes, start: tuple[float, float], end: tuple[float, float], text: str = "",
          color: str = INK, bend: float = 0.0, style: str = "-") -> None:
    """An arrow, with its text above the middle."""
    axes.annotate("", end, start, arrowprops=dict(
        arrowstyle="-|>", color=color, lw=1.5, ls=style, shrinkA=0, shrinkB=0,
        connectionstyle=f"arc3,rad={bend}"))
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    axes.text(x, y + 0.12, text, ha="center", va="bottom", fontsize=10, color=color)


def chain(axes: plt.Axes, y: float, texts: Sequence[str], first: float, gap: float, w: float,
          h: float = 0.8) -> list[float]:
    """Boxes from left to right with arrows between them; returns their centres."""
    centers = [first + gap * i for i in range(len(texts))]
    for x, text in zip(centers, texts, strict=True):
        box(axes, x, y, text, w, h)
    for a, b in zip(centers, centers[1:], strict=False):
        arrow(axes, (a + w / 2, y), (b - w / 2, y))
    return centers


def step(axes: plt.Axes) -> None:
    limits(axes, 12.6, 4.2)
    top = chain(axes, 3.1, ["prompts", "rollout", "scores,\nrewards", "advantages",
                            "policy\nupdate", "publish"], 1.1, 2.08, 1.5)
    low = [(top[1], "features of\nthe actor"), (top[3], "drafter\nupdate"),
           (top[4], "publish\ndrafter")]
    for x, text in low:
        box(axes, x, 1.0, text, 1.6)
    arrow(axes, (top[1], 2.7), (top[1], 1.4))
    arrow(axes, (low[0][0] + 0.8, 1.0), (low[1][0] - 0.8, 1.0))
    arrow(axes, (low[1][0] + 0.8, 1.0), (low[2][0] - 0.8, 1.0))
    arrow(axes, (low[2][0] - 0.6, 1.4), (top[1] + 0.55, 2.7), color=SOFT, bend=0.12)
    arrow(axes, (top[5] - 0.2, 3.5), (top[1] + 0.2, 3.5), color=SOFT, bend=0.13)


def rounds(axes: plt.Axes) -> None:
    limits(axes, 12.6, 2.9)
    centers = chain(axes, 1.7, ["plan\n(control)", "draft\n(draft)", "prune\n(control)",
                               "verify\n(verify)", "commit\n(verify)", "observe\n(both)"],
                   1.15, 2.06, 1.5)
    arrow(axes, (centers[-1], 1.3), (centers[0], 1.3), color=SOFT, bend=-0.16)
    axes.text(6.3, 0.25, "the next round: other depth, other tree, nothing compiles",
              ha="center", fontsize=10)


def match_rule(axes: plt.Axes) -> None:
    limits(axes, 12.6, 5.0)
    tokens = ["73", "72", "74", "The"]
    logp, noise = np.array([1.5, 1.9, 0.9, 0.3]), np.array([1.0, 0.2, 0.5, 0.8])
    panels = [(1.2, "log p, up to a constant", logp, -1), (4.6, "+  fixed noise", noise, -1),
              (8.0, "=  score", logp + noise, 0)]
    for left, title, values, best in panels:
        axes.text(left, 4.55, title, fontsize=12)
        for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
            y = 3.8 - 0.6 * i
            axes.barh(y, value * 0.9, 0.38, left=left, color=BLUE if i == best else SOFT)
            axes.text(left - 0.15, y, token, ha="right", va="center", fontsize=10)
    axes.text(10.45, 3.8, "the draw:  y = 73", va="center", color=BLUE)
    box(axes, 3.3, 0.75, "draft 73:  equal, so emitted;\nthe walk continues below it", 4.4, 0.95)
    box(axes, 8.9, 0.75, "draft 72:  not equal, so 73 is emitted\nand the round ends for this row",
        5.3, 0.95, edge=ORANGE, face=PAPER)


def tree(axes: plt.Axes) -> None:
    limits(axes, 12.6, 5.0)
    nodes = {  # name: (x, y, text, parent, colour, line)
        "root": (1.2, 2.6, "... =", None, BLUE, "-"),
        "a": (4.0, 3.7, "7   0.62", "root", BLUE, "-"),
        "b": (4.0, 1.3, "8   0.21", "root", BLUE, "-"),
        "c": (6.8, 4.3, "3   0.48", "a", BLUE, "-"), "d": (6.8, 3.0, "2   0.09", "a", SOFT, "--"),
        "e": (6.8, 1.3, "1   0.06", "b", SOFT, "--"),
        "f": (9.6, 4.3, "<end>   0.37", "c", BLUE, "-")}
    for x, y, text, parent, color, line in nodes.values():
        if parent:
            px, py = nodes[parent][:2]
            arrow(axes, (px + 0.85, py), (x - 0.85, y), color=color, style=line)
        face = PALE if color == BLUE else PAPER
        box(axes, x, y, text, h=0.66, edge=color, face=face, style=line)
    axes.text(1.2, 2.0, "last emitted token", ha="center", fontsize=10)
    axes.text(10.7, 4.3, "branch of depth 3", fontsize=10, va="center")
    axes.text(7.8, 3.0, "dropped by keep: too unlikely to be reached", fontsize=10, va="center")
    axes.text(7.8, 1.3, "the same", fontsize=10, va="center")
    axes.text(6.3, 0.35, "number = survival: the estimated probability that this node is accepted",
              ha="center", fontsize=10)


def buckets(axes: plt.Axes) -> None:
    limits(axes, 12.6, 4.7)
    used = {"row 1": 5, "row 2": 3, "row 3": 1, "row 4": 2}
    shades = [BLUE, "#5b93c9", "#93b8dc", "#c2d8ee"]
    axes.text(0.3, 4.35, "kept nodes of each row, its last token included")
    for r, (row, count) in enumerate(used.items()):
        axes.text(0.3, 3.75 - 0.45 * r, row, va="center", fontsize=10)
        for n in range(count):
            axes.add_patch(plt.Rectangle((1.3 + 0.42 * n, 3.58 - 0.45 * r), 0.36, 0.34,
                                         fc=shades[r]))
    colours = [shades[r] for r, count in enumerate(used.values()) for _ in range(count)]
    for i, size in enumerate((4, 8, 16, 32)):
        y, taken = 3.7 - 0.85 * i, size == 16
        axes.text(4.5, y, f"bucket {size}", va="center", color=BLUE if taken else INK,
                  weight="bold" if taken else "normal", fontsize=10)
        for n in range(size):
            face = colours[n] if taken and n < len(colours) else "none"
            axes.add_patch(plt.Rectangle((5.8 + 0.205 * n, y - 0.15), 0.18, 0.3,
                                         fc=face, ec=SOFT, lw=0.7))
    axes.text(0.3, 1.2, "11 tokens go into\nthe smallest bucket\nthat holds them", va="center",
              fontsize=10)


def controller(axes: plt.Axes) -> None:
    limits(axes, 12.6, 4.7)
    box(axes, 1.7, 3.6, "costs of rounds,\nmeasured at start", 2.7)
    box(axes, 1.7, 1.5, "acceptance,\ncalibrated", 2.7)
    box(axes, 5.6, 2.55, "tokens expected\nless seconds\nof each choice", 2.3, 1.3)
    box(axes, 8.9, 2.55, "depth, nodes,\nbucket, or off", 2.2)
    box(axes, 11.6, 2.55, "round", 1.3)
    arrow(axes, (3.05, 3.5), (4.45, 2.9))
    arrow(axes, (3.05, 1.6), (4.45, 2.2))
    arrow(axes, (6.75, 2.55), (7.8, 2.55))
    arrow(axes, (10.0, 2.55), (10.95, 2.55))
    arrow(axes, (11.6, 2.15), (1.7, 1.1), color=SOFT, bend=-0.14)
    arrow(axes, (11.6, 2.95), (1.7, 4.0), color=SOFT, bend=0.13)
    for y, text in ((4.4, "seconds of each launch correct the costs (host)"),
                    (0.25, "what was accepted corrects the estimates (device)")):
        axes.text(6.9, y, text, ha="center", fontsize=10)


def evolving(axes: plt.Axes) -> None:
    limits(axes, 12.6, 4.2)
    steps = (("D0", False), ("D0", True), ("D1", False), ("D1", True))
    for i, (drafter, train) in enumerate(steps):
        x = 2.7 + 2.55 * i
        box(axes, x, 3.3, f"rollout\nactor P{i}, drafter {drafter}", 2.3, 0.9)
        box(axes, x, 2.0, "policy update", 2.2, 0.6, edge=SOFT, face=PAPER)
        arrow(axes, (x, 2.85), (x, 2.3))
        if train:
            box(axes, x, 0.8, f"drafter update\nD{i // 2} to D{i // 2 + 1}", 2.2, 0.8)
            arrow(axes, (x, 1.7), (x, 1.2))
        if i < 3:
            arrow(axes, (x + 1.1, 2.0), (x + 1.45, 2.85), color=SOFT)
    for y, text in ((3.3, "generate"), (2.0, "learn"), (0.8, "distil, every\nsecond step")):
        axes.text(0.15, y, text, va="center", fontsize=10)


def exactness(axes: plt.Axes) -> None:
    limits(axes, 12.6, 4.3)
    for y, text in ((3.7, "weights, prompt"), (2.95, "temperature,\ntop-k, top-p, min-p"),
                    (2.2, "seed, step, prompt id,\nsample id, token index")):
        box(axes, 2.2, y, text, 3.7, 0.6)
        arrow(axes, (4.05, y), (5.6, 2.95))
    box(axes, 6.9, 2.95, "the token", 2.6, 1.0)
    for y, text in ((3.7, "drafter, tree, controller"), (2.95, "batch size, order, slots"),
                    (2.2, "restart, mesh, processes")):
        box(axes, 10.5, y, text, 3.6, 0.6, edge=SOFT, face=PAPER, style="--")
    axes.text(2.2, 1.35, "decide it", ha="center", color=BLUE)
    axes.text(10.5, 1.35, "decide only when it comes", ha="center")
    axes.text(6.3, 0.5, "programs of other shapes may round differently: near ties are reported as "
              "such", ha="center", fontsize=10)


DRAWINGS = {"step": step, "round": rounds, "match_rule": match_rule, "tree": tree,
            "buckets": buckets, "controller": controller, "evolving": evolving,
            "exactness": exactness}

if __name__ == "__main__":
    main()
