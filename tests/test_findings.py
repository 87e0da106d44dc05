"""Figures of docs/findings.md and other pages are those of the committed results."""

import json
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from specrl_jax.config.rl import ALGORITHMS
from tests.test_docs import RESULTS, ROOT, script

results: ModuleType = script("results")
GIB = 2**30
T_6 = 2.571  # Student's t for 95 % and six repeats; results.T_5 is that for five seeds
RATIO = ("ratio", "low", "high")
SPEED = ("speed", "low", "high")
MODES = ("frozen", "every_step", "every_5", "once", "trigger", "overlap")
BUGS = ("rejection", "lossy_greedy", "lossy_default_sampling", "lossy_accept_all",
        "lossy_shared_noise", "lossy_retrospective")
LOSSES = ("jsd", "tv", "lk", "e2e_tv", "reward_weighted_kl", "advantage_weighted_kl")
INTERVALS = ("late_1", "every_3", "every_5", "late_5")


def interval(values: Any, digits: int = 2, sign: str = "") -> str:
    """Returns mean (low .. high) as the page writes it."""
    mean, low, high = (round(float(value), digits) + 0.0 for value in values)
    return f"{mean:{sign}.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def rounded(digits: int, *values: float) -> Iterator[str]:
    return (f"{value:,.{digits}f}" for value in values)


def extremes(digits: int, values: Any) -> Iterator[str]:
    return rounded(digits, min(values), max(values))


def staleness() -> Iterator[str]:
    summary = results.read("staleness_modes")["summary"]
    for arm in MODES:
        s = summary[arm]
        yield from (interval(s["acceptance_end"]), interval(s["net_seconds"], 1))
        yield from rounded(1, s["spent_seconds"][0], s["saved_seconds"][0])
        if arm != "frozen":
            yield interval(s["over_frozen"]["net_seconds"], 1)
    watched, trained = summary["watched"], summary["every_step"]["over_frozen"]
    mean, low, high = watched["unexplained_end"]
    yield from (interval((-mean, -high, -low)), interval(trained["acceptance_end"]))
    yield from rounded(2, *(watched[f"{name}_{at}"][0] for name in ("entropy", "acceptance")
                            for at in ("begin", "end")))
    data = results.read("staleness_modes")
    accepted = results.curves(data, "frozen", "acceptance")
    quarter = accepted.shape[1] // 4
    yield interval(student(accepted[:, -quarter:].mean(1) - accepted[:, :quarter].mean(1)),
                   sign="+")
    late = summary["overlap"]["over_frozen"]
    mean, low, high = late["ahead_seconds"]
    yield f"{-mean:.1f} s slower in {accepted.shape[1]} steps ({-high:.1f} .. {-low:.1f})"
    yield from rounded(1, late["net_seconds"][0], late["net_seconds"][0] - mean)
    yield from rounded(0, results.curves(data, "plain", "rollout_seconds").sum(1).mean())


def student(values: Any, t: float = results.T_5) -> tuple[float, float, float]:
    """Returns mean, low and high at 95 %; `t` is for as many values as there are."""
    mean, error = values.mean(), values.std(ddof=1) / np.sqrt(len(values)) * t
    return mean, mean - error, mean + error


def bugs() -> Iterator[str]:
    cases, summary = (results.read("staleness_bugs")[x] for x in ("cases", "summary"))
    assert all(case["frozen"]["tokens_equal"] for case in cases.values())
    yield from rounded(2, summary["plain"]["reward_mean"][0],
                       *(summary[arm]["reward_end"][0] for arm in ("frozen", *BUGS)))
    for arm in BUGS:
        yield interval(summary[arm]["over_plain"]["reward_mean"], sign="+")


def paired(result: str, base: str, arms: tuple[str, ...], sign: str) -> Iterator[str]:
    data = results.read(result)
    reference = results.curves(data, base, "acceptance").mean(1)
    for arm in arms:
        values = results.curves(data, arm, "acceptance").mean(1) - reference
        yield interval(student(values), 3, sign)


def losses() -> Iterator[str]:
    yield from paired("staleness_losses", "forward_kl", LOSSES, "+")
    data = results.read("staleness_losses")
    last = {arm: results.curves(data, arm, "acceptance")[:, -10:].mean(1)
            for arm in ("forward_kl", *LOSSES)}
    for arm in LOSSES:  # in the last quarter, no loss differs
        _, low, high = student(last[arm] - last["forward_kl"])
        assert low < 0 < high


def gain() -> Iterator[str]:
    result = results.read("bench_speculation_budget_cpu")["adapting"]
    paper, ours = result["paper"]["geometric"], result["eagle"]["geometric"]
    kinds = static, off, best = ("best static", "best static or off", "per load")
    for kind in kinds:
        yield from rounded(2, paper[kind]["speed"], ours[kind]["speed"])
    for kind in (*kinds, "budget"):
        yield interval([ours[kind][x] for x in SPEED])
    share = np.log(paper[off]["speed"] / paper[static]["speed"]) / np.log(
        paper[best]["speed"] / paper[static]["speed"])
    assert round(3 * share) == 1
    yield from rounded(0, 100 * (paper[best]["speed"] / paper[static]["speed"] - 1))
    yield from extremes(0, result["paper"]["break_even"].values())
    yield from extremes(1, [x for x in result["eagle"]["break_even"].values() if x])
    before = results.read("bench_speculation_heatmap_cpu")["adapting"]
    yield from extremes(1, [x for drafter in ("eagle", "history", "merge")
                            for name, x in before[drafter]["break_even"].items() if "x" in name])
    one, four = (results.read(f"bench_speculation_arithmetic_{n}_t1_cpu")["cases"][n]["arms"]
                 for n in ("1", "4"))
    fastest = one["merge 4x2x8"]["speedup"]
    assert fastest["median"] == max(arm["speedup"]["median"] for arm in one.values())
    yield from rounded(2, fastest["min"], fastest["max"])
    yield from extremes(2, [arm["speedup"]["median"] for name, arm in four.items() if "x" in name])


def smollm2() -> list[str]:
    """Returns the speed of rollouts, of steps with a frozen head, and with one that trains."""
    runs = results.read("staleness_smollm2_turns")["cases"]["0"]
    total = {(arm, x): sum(runs[arm][x]) for arm in runs for x in ("seconds", "rollout_seconds")}
    return [*rounded(2, *(total["plain", x] / total[arm, x] for arm, x in (
        ("frozen", "rollout_seconds"), ("frozen", "seconds"), ("every_5", "seconds"))))]


def steps() -> Iterator[str]:
    yield from smollm2()
    arms = results.read("bench_speculation_gsm8k_1600_1_cpu")["cases"]["1"]["arms"]
    history, eagle, merge = (arms[f"{name} 4x2x8"]["speedup"]
                             for name in ("history", "eagle", "merge"))
    yield from rounded(2, history["median"], eagle["median"], merge["median"])
    for a, b in ((history, eagle), (merge, history)):
        yield interval(np.exp(student(np.log(np.divide(a["values"], b["values"])), T_6)))


def controller() -> Iterator[str]:
    summary = results.read("bench_controller_small")["summary"]
    heavy = summary["heavy_useful"]
    for part in (summary["budget"], summary["respec"], summary["bandit"], heavy["budget"], *(
            results.read(f"bench_controller_{name}")["summary"]["budget"]
            for name in ("smollm2_arithmetic", "smollm2"))):
        yield interval([part[x] for x in RATIO], 3)
    yield from (f"{summary['budget']['cells']}", f"{heavy['cells']}")
    whole = results.read("bench_controller_smollm2_stop")["cases"]["64x64-own-stop"]["arms"]
    assert whole["budget"]["pairs"] == 3
    yield interval([whole["budget"][x] for x in RATIO])


def compilers() -> Iterator[str]:
    compiled = [json.loads(file.read_text(encoding="utf-8"))
                for file in RESULTS.glob("compile_*.json")]
    yield from extremes(0, [100 * results.filled(one, name) for one in compiled
                            for name in ("launch", "update")])
    settings = results.read("gpu_rollouts_gpu")["cases"]["Qwen2.5-0.5B, 1 rows"]["settings"]
    for kind in ("off", "replay"):
        yield from extremes(0, [x["tokens_per_second"] for name, x in settings.items()
                                if name.startswith(kind)])
    yield from extremes(0, [x["over_bound"] for name, x in settings.items()
                            if name.startswith("off")])


def algorithms() -> Iterator[str]:
    cases = results.read("bench_algorithms_smollm2")["cases"]
    reached = {name: case["accuracy"] for name, case in cases.items()}
    seeds = [reached[name] for name in ("grpo", "grpo_seed_1", "grpo_seed_2")]
    yield from extremes(3, seeds)
    yield from extremes(3, [reached[name] for name in ALGORITHMS])
    outside = {name for name in ALGORITHMS if not min(seeds) <= reached[name] <= max(seeds)}
    assert outside == {"dr_grpo", "remax"} and min(seeds) < reached["lora"] < max(seeds)
    yield from rounded(3, min(seeds) - reached["dr_grpo"], reached["remax"] - max(seeds),
                       reached["lora"], cases["spell_backward"]["accuracy"])
    yield from extremes(3, [case["greedy"]["after"] for case in
                            results.read("smollm2_seeds_cpu")["seeds"].values()])
    yield from rounded(2, *(cases[task][f"reward_{at}"] for task in ("spell_backward", "chain_sum")
                            for at in ("first", "last")))


def readme() -> Iterator[str]:
    yield from smollm2()[:2]
    ours = results.read("bench_speculation_budget_cpu")["adapting"]["eagle"]["break_even"]
    yield from extremes(1, [x for x in ours.values() if x])
    yield yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]


def comparison() -> Iterator[str]:
    yield from smollm2()
    yield from rounded(1, *(case["ratios"]["off/tunix"]["median"] for case in
                            results.read("bench_rollout_tunix_cpu")["cases"].values()))


def near_ties() -> dict[str, Any]:
    """Returns those of bfloat16, of which there is one in a hundred tokens."""
    actual = results.read("near_ties_bfloat16_smollm2")
    assert round(100 * actual["near_ties"] / actual["tokens"]) == 1
    return actual


def compare_runs() -> Iterator[str]:
    differences = near_ties()["differences"]
    yield f"{max(x['gap'] for x in differences):.1f}"
    yield from extremes(1, [x["tolerance"] for x in differences])


def log() -> Iterator[str]:
    actual = near_ties()
    gaps, limits = ([x[key] for x in actual["differences"]] for key in ("gap", "tolerance"))
    yield from (f"{actual['near_ties']}", f"{actual['tokens']:,}", f"{min(gaps):.3f}")
    yield from (f"{max(gaps):.2f}", f"{min(limits):.2f}", f"{max(limits):.1f}")
    idle = results.read("bench_speculation_budget_cpu")["cases"]["64"]["arms"]["eagle 0"]["speedup"]
    yield from rounded(3, idle["median"], idle["min"], idle["max"])


def when_it_pays() -> Iterator[str]:
    for rows, case in results.read("bench_speculation_budget_cpu")["cases"].items():
        chains, plain = case["arms"]["eagle 2x1x3"], case["arms"]["off"]
        cost = chains["round_seconds"]["median"] / plain["round_seconds"]["median"]
        if rows in ("1", "4", "16", "64"):
            yield rows
            yield from rounded(2, chains["accept_length"], cost, chains["speedup"]["median"])


def evolving() -> Iterator[str]:
    summary = results.read("staleness_modes")["summary"]
    for arm in ("frozen", "once", "every_step", "every_5", "trigger"):
        yield from rounded(2, summary[arm]["acceptance_end"][0])
        if arm != "frozen":
            yield interval(summary[arm]["over_frozen"]["net_seconds"], 1)
    yield from smollm2()[1:]


def train_drafter() -> Iterator[str]:
    for name in ("arithmetic", "gsm8k_1600"):
        actual = list(results.read(f"drafter_{name}_cpu")["held_out"].values())[-1]
        yield from rounded(3, *(actual[f"match/{depth}"] for depth in range(4)))
        yield from rounded(2, actual["accept_length/4"])


def compile_for() -> Iterator[str]:
    """What 7B needs on v6e:4x4; the table there is written by docs/generate.py."""
    programs = results.read("compile_qwen2_5_7b_v6e_4x4")["programs"]
    (update,) = (x for x in programs if x["program"].startswith("update"))
    resident = update["resident"]
    drafter = sum(x for name, x in resident.items() if name not in ("cache", "published"))
    yield from rounded(2, *(x / GIB for x in (
        resident["cache"], resident["published"], drafter, update["peak"])))
    yield from rounded(1, (update["peak"] + sum(resident.values())) / GIB, update["limit"] / GIB)


PAGES = {"docs/findings.md": [
    *gain(), *staleness(), *bugs(), *losses(),
    *paired("staleness_intervals", "every_1", INTERVALS, ""), *steps(), *controller(),
    *compilers(), *algorithms()],
    "README.md": readme(), "docs/comparison.md": comparison(),
    "docs/concepts.md": [f"{near_ties()['sequences']}"], "experiments/LOG.md": log(),
    "docs/guides/compare_runs.md": compare_runs(),
    "docs/guides/when_it_pays.md": when_it_pays(), "docs/guides/evolving_drafter.md": evolving(),
    "docs/guides/train_drafter.md": train_drafter(), "docs/compile_for.md": compile_for()}


# A number, with its interval if it has one.
FIGURE = re.compile(r"-?\d+(?:[.,]\d+)*(?: \(-?\d+(?:\.\d+)? \.\. -?\d+(?:\.\d+)?\))?")


@pytest.mark.parametrize(("page", "figures"), [
    (page, {*figures}) for page, figures in PAGES.items()],
    ids=lambda x: x if isinstance(x, str) else "")
def test_figures_on_a_page_are_their_results(page: str, figures: set[str]) -> None:
    """The words around them are free."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    wanted = {figure for part in figures for figure in FIGURE.findall(part)}
    assert wanted and wanted - set(FIGURE.findall(text)) == set()
