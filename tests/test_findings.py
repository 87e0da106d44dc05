"""Figures of docs/findings.md and other pages are those of the committed results."""

import json
import re
import tomllib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from specrl_jax.config.rl import ALGORITHMS
from tests.test_docs import RESULTS, ROOT, script

results: ModuleType = script("results")
GIB = 2**30
T_6 = 2.571  # Student's t for 95 % and six repeats; results.T_5 is that for five seeds
RATIO = ("ratio", "low", "high")
MODES = {"frozen": "frozen", "every_step": "every step", "every_5": "every 5 steps",
         "once": "once, before RL", "trigger": "on a trigger", "overlap": "one step late"}
BUGS = {"rejection": "rejection", "lossy_greedy": "greedy at temperature 0.5",
        "lossy_default_sampling": "the engine's default sampling settings",
        "lossy_accept_all": "accepts everything",
        "lossy_shared_noise": "shared noise: a rejected draft is replaced with the noise that "
                              "drew the drafts",
        "lossy_retrospective": "retrospective truncation: a draft is dropped if the drafter is "
                               "unsure of the next one"}
LOSSES = {"jsd": "JSD", "tv": "TV", "lk": "LK", "e2e_tv": "end-to-end TV",
          "reward_weighted_kl": "reward weighting moved acceptance by",
          "advantage_weighted_kl": "Weighting by advantage:"}
INTERVALS = {"late_1": "one step late moves acceptance by", "every_3": "every third step by",
             "every_5": "every fifth by", "late_5": "every fifth and late by"}


def interval(values: Any, digits: int = 2, sign: str = "") -> str:
    """Returns mean (low .. high) as the page writes it."""
    mean, low, high = (round(float(value), digits) + 0.0 for value in values)
    return f"{mean:{sign}.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def staleness() -> Iterator[str]:
    summary = results.read("staleness_modes")["summary"]
    for arm, name in MODES.items():
        s = summary[arm]
        yield (f"| {name} | {interval(s['acceptance_end'])} | {s['spent_seconds'][0]:.1f} | "
               f"{s['saved_seconds'][0]:.1f} | {interval(s['net_seconds'], 1)} | "
               + ("|" if arm == "frozen" else f"{interval(s['over_frozen']['net_seconds'], 1)} |"))
    watched, trained = summary["watched"], summary["every_step"]["over_frozen"]
    mean, low, high = watched["unexplained_end"]
    yield f"the last quarter should be {interval((-mean, -high, -low))} higher still"
    yield f"the {interval(trained['acceptance_end'])} that a trained head has more"
    yield (f"entropy falls from {watched['entropy_begin'][0]:.2f} to "
           f"{watched['entropy_end'][0]:.2f} nats")
    yield (f"a frozen head goes from {watched['acceptance_begin'][0]:.2f} in the first quarter of "
           f"40 steps to {watched['acceptance_end'][0]:.2f} in the last, a change of {rise()},")
    yield f"It [changed](#figure-4-staleness) by {rise()}"
    late = summary["overlap"]["over_frozen"]
    mean, low, high = late["ahead_seconds"]
    yield (f"{-mean:.1f} s slower in 40 steps than a frozen head's ({-high:.1f} .. {-low:.1f}), by "
           f"Figure 4's account {late['net_seconds'][0]:.1f} s faster")
    yield f"lengthens the update by [{late['net_seconds'][0] - mean:.1f} s]"
    plain = results.curves(results.read("staleness_modes"), "plain", "rollout_seconds")
    yield f"net, s (plain rollouts: {plain.sum(1).mean():.0f} s)"


def rise() -> str:
    """Returns how a frozen head's acceptance changed, from the first to the last quarter."""
    accepted = results.curves(results.read("staleness_modes"), "frozen", "acceptance")
    quarter = accepted.shape[1] // 4
    return interval(student(accepted[:, -quarter:].mean(1) - accepted[:, :quarter].mean(1)),
                    sign="+")


def student(values: Any, t: float = results.T_5) -> tuple[float, float, float]:
    """Returns mean, low and high at 95 %; `t` is for as many values as there are."""
    mean, error = values.mean(), values.std(ddof=1) / np.sqrt(len(values)) * t
    return mean, mean - error, mean + error


def bugs() -> Iterator[str]:
    cases, summary = (results.read("staleness_bugs")[x] for x in ("cases", "summary"))
    assert all(case["frozen"]["tokens_equal"] for case in cases.values())
    yield f"reward against plain ({summary['plain']['reward_mean'][0]:.2f})"
    end = summary["frozen"]["reward_end"][0]
    yield f"| match | the same curve, token for token | {end:.2f} |"
    for arm, name in BUGS.items():
        actual = summary[arm]
        yield (f"| {name} | {interval(actual['over_plain']['reward_mean'], sign='+')} | "
               f"{actual['reward_end'][0]:.2f} |")


def paired(result: str, base: str, arms: dict[str, str], sign: str) -> Iterator[str]:
    data = results.read(result)
    reference = results.curves(data, base, "acceptance").mean(1)
    for arm, name in arms.items():
        values = results.curves(data, arm, "acceptance").mean(1) - reference
        yield f"{name} {interval(student(values), 3, sign)}"


def losses() -> Iterator[str]:
    yield from paired("staleness_losses", "forward_kl", LOSSES, "+")
    data = results.read("staleness_losses")
    last = {arm: results.curves(data, arm, "acceptance")[:, -10:].mean(1)
            for arm in ("forward_kl", *LOSSES)}
    for arm in LOSSES:
        _, low, high = student(last[arm] - last["forward_kl"])
        assert low < 0 < high
    yield "in the last quarter, no loss differs"


def gain() -> Iterator[str]:
    result = results.read("bench_speculation_budget_cpu")["adapting"]
    paper, ours = result["paper"]["geometric"], result["eagle"]["geometric"]
    for kind, name in {"best static": "one best setting", "best static or off":
                       "one setting, or off", "per load": "best setting of each load"}.items():
        here = interval([ours[kind][x] for x in ("speed", "low", "high")])
        yield f"| {name} | {paper[kind]['speed']:.2f} | {here} |"
    static, off, best = ("best static", "best static or off", "per load")
    share = np.log(paper[off]["speed"] / paper[static]["speed"]) / np.log(
        paper[best]["speed"] / paper[static]["speed"])
    assert round(3 * share) == 1
    yield (f"a third of what perfect tuning does ({paper[static]['speed']:.2f} to "
           f"{paper[off]['speed']:.2f}, of {paper[best]['speed']:.2f})")
    yield (f"nearly all ({ours[static]['speed']:.2f} to {ours[off]['speed']:.2f}, of "
           f"{ours[best]['speed']:.2f})")
    more = 100 * (paper[best]["speed"] / paper[static]["speed"] - 1)
    yield f"{paper[best]['speed']:.2f} is {more:.0f} % above {paper[static]['speed']:.2f}"
    here = interval([ours["budget"][x] for x in ("speed", "low", "high")])
    yield f"| `budget`, round by round | | {here} |"
    rows = [x for x in result["eagle"]["break_even"].values() if x]
    h100 = result["paper"]["break_even"].values()
    yield (f"breaks even at {min(h100):.0f} to {max(h100):.0f} rows on an H100, depending on the "
           f"setting; here, at {min(rows):.1f} to {max(rows):.1f} on two cores")
    yield f"ours at {min(rows):.1f} to {max(rows):.1f}, and budget"
    before = results.read("bench_speculation_heatmap_cpu")["adapting"]
    rows = [x for drafter in ("eagle", "history", "merge")
            for setting, x in before[drafter]["break_even"].items() if "x" in setting]
    yield f"broke even at [{min(rows):.1f} to {max(rows):.1f} rows]"
    one, four = (results.read(f"bench_speculation_arithmetic_{n}_t1_cpu")["cases"][n]["arms"]
                 for n in ("1", "4"))
    best = one["merge 4x2x8"]["speedup"]
    assert best["median"] == max(arm["speedup"]["median"] for arm in one.values())
    yield f"(range {best['min']:.2f} to {best['max']:.2f}) at one row"
    slow = [arm["speedup"]["median"] for name, arm in four.items() if "x" in name]
    yield f"four rows are at {min(slow):.2f} to {max(slow):.2f} of plain decoding"


def smollm2() -> tuple[float, float, float]:
    """Returns the speed of rollouts, of steps with a frozen head, and with one that trains."""
    runs = results.read("staleness_smollm2_turns")["cases"]["0"]
    total = {(arm, x): sum(runs[arm][x]) for arm in runs for x in ("seconds", "rollout_seconds")}
    rollouts, frozen, trained = (total["plain", x] / total[arm, x] for arm, x in (
        ("frozen", "rollout_seconds"), ("frozen", "seconds"), ("every_5", "seconds")))
    return rollouts, frozen, trained


def steps() -> Iterator[str]:
    rollouts, frozen, trained = smollm2()
    yield (f"Rollouts {rollouts:.2f} times and steps {frozen:.2f} times as fast with a frozen "
           f"head merged with `history`, {trained:.2f} with one that trains")
    arms = results.read("bench_speculation_gsm8k_1600_1_cpu")["cases"]["1"]["arms"]
    history, eagle, merge = (arms[f"{name} 4x2x8"]["speedup"]
                             for name in ("history", "eagle", "merge"))
    yield (f"`history` gains {history['median']:.2f}, the head {eagle['median']:.2f} and both "
           f"merged {merge['median']:.2f}")
    over, both = (interval(np.exp(student(np.log(np.divide(a["values"], b["values"])), T_6)))
                  for a, b in ((history, eagle), (merge, history)))
    yield (f"`history` is {over} times as fast as the head, and both are {both} times as fast as "
           f"`history`")


def controller() -> Iterator[str]:
    summary = results.read("bench_controller_small")["summary"]
    budget, respec, bandit, heavy = (
        interval([part[x] for x in RATIO], 3) for part in (
            summary["budget"], summary["respec"], summary["bandit"],
            summary["heavy_useful"]["budget"]))
    yield f"{budget} of it over {summary['budget']['cells']} small cells"
    yield f"`respec`, the paper's kind, {respec}; a bandit {bandit}"
    cells = summary["heavy_useful"]["cells"]
    yield f"Over the {cells} cells with heavy-tailed lengths and a useful drafter"
    yield f"`budget` is {heavy} times as fast as the single best setting"
    good, weaker = (results.read(f"bench_controller_{name}")["summary"]["budget"]
                    for name in ("smollm2_arithmetic", "smollm2"))
    yield (f"reaches {interval([good[x] for x in RATIO], 3)} with a good head and "
           f"{interval([weaker[x] for x in RATIO], 3)} with a weaker one")
    whole = results.read("bench_controller_smollm2_stop")["cases"]["64x64-own-stop"]["arms"]
    assert whole["budget"]["pairs"] == 3
    yield f"{interval([whole['budget'][x] for x in RATIO])} of plain decoding over three pairs"


def compilers() -> Iterator[str]:
    compiled = [json.loads(file.read_text(encoding="utf-8"))
                for file in RESULTS.glob("compile_*.json")]
    shares = [results.filled(one, name) for one in compiled for name in ("launch", "update")]
    yield f"all between {min(shares):.0%} and {max(shares):.0%}]"
    settings = results.read("gpu_rollouts_gpu")["cases"]["Qwen2.5-0.5B, 1 rows"]["settings"]
    speed = {name: round(x["tokens_per_second"]) for name, x in settings.items()}
    off = [x for name, x in speed.items() if name.startswith("off")]
    drafted = [x for name, x in speed.items() if name.startswith("replay")]
    yield (f"{min(drafted):,} to {max(drafted):,} tokens/s against {min(off):,} to {max(off):,}")
    bound = [x["over_bound"] for name, x in settings.items() if name.startswith("off")]
    yield f"took {min(bound):.0f} to {max(bound):.0f} times their bandwidth bound"


def algorithms() -> Iterator[str]:
    cases = results.read("bench_algorithms_smollm2")["cases"]
    reached = {name: case["accuracy"] for name, case in cases.items()}
    seeds = [reached[name] for name in ("grpo", "grpo_seed_1", "grpo_seed_2")]
    named = [reached[name] for name in ALGORITHMS]
    yield f"of `grpo` reach {min(seeds):.3f} to {max(seeds):.3f} on held-out sums"
    yield f"eight algorithms lie between {min(named):.3f} and {max(named):.3f}"
    outside = {name for name in ALGORITHMS if not min(seeds) <= reached[name] <= max(seeds)}
    assert outside == {"dr_grpo", "remax"}
    yield (f"outside the range of those seeds, by {min(seeds) - reached['dr_grpo']:.3f} and "
           f"{reached['remax'] - max(seeds):.3f}")
    own = [case["greedy"]["after"] for case in results.read("smollm2_seeds_cpu")["seeds"].values()]
    yield f"when no name is given, reach {min(own):.3f} to {max(own):.3f}"
    assert min(seeds) < reached["lora"] < max(seeds)
    yield f"ends at {reached['lora']:.3f}, within the range of the full-weight seeds"
    words, sums = cases["spell_backward"], cases["chain_sum"]
    yield (f"from {words['reward_first']:.2f} to {words['reward_last']:.2f}, but only "
           f"{words['accuracy']:.3f} of held-out words")
    yield f"falls from {sums['reward_first']:.2f} to {sums['reward_last']:.2f}"


def readme() -> Iterator[str]:
    rollouts, frozen, _ = smollm2()
    yield f"rollouts {rollouts:.2f}x, whole steps {frozen:.2f}x"
    ours = results.read("bench_speculation_budget_cpu")["adapting"]["eagle"]["break_even"]
    rows = [x for x in ours.values() if x]
    yield f"stop paying at {min(rows):.1f} to {max(rows):.1f} rows"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield f"version = {{{version['version']}}}"


def comparison() -> Iterator[str]:
    rollouts, frozen, trained = smollm2()
    yield f"| {rollouts:.2f} | {frozen:.2f}; {trained:.2f} with a drafter that trains |"
    one, eight = (case["ratios"]["off/tunix"]["median"] for case in
                  results.read("bench_rollout_tunix_cpu")["cases"].values())
    yield f"are {one:.1f} to {eight:.1f} times as fast as tunix's"


def near_ties() -> dict[str, Any]:
    """Returns those of bfloat16, of which there is one in a hundred tokens."""
    actual = results.read("near_ties_bfloat16_smollm2")
    assert round(100 * actual["near_ties"] / actual["tokens"]) == 1
    return actual


def concepts() -> Iterator[str]:
    yield "it was [one token in a hundred]"
    yield f"with SmolLM2, in one step of {near_ties()['sequences']} responses"


def compare_runs() -> Iterator[str]:
    gaps, limits = ([x[key] for x in near_ties()["differences"]] for key in ("gap", "tolerance"))
    yield (f"with gaps up to {max(gaps):.1f} and limits of {min(limits):.1f} to "
           f"{max(limits):.1f}")


def log() -> Iterator[str]:
    actual = near_ties()
    gaps, limits = ([x[key] for x in actual["differences"]] for key in ("gap", "tolerance"))
    yield (f"{actual['near_ties']} first differences in {actual['tokens']:,} tokens, "
           f"{min(gaps):.3f} to {max(gaps):.2f} below the best score, where rounding explains "
           f"{min(limits):.2f} to {max(limits):.1f}")
    idle = results.read("bench_speculation_budget_cpu")["cases"]["64"]["arms"]["eagle 0"]["speedup"]
    yield f"a median of {idle['median']:.3f} ({idle['min']:.3f} .. {idle['max']:.3f} from"


def when_it_pays() -> Iterator[str]:
    for rows, case in results.read("bench_speculation_budget_cpu")["cases"].items():
        chains, plain = case["arms"]["eagle 2x1x3"], case["arms"]["off"]
        cost = chains["round_seconds"]["median"] / plain["round_seconds"]["median"]
        if rows in ("1", "4", "16", "64"):
            yield (f"| {rows} | {chains['accept_length']:.2f} | {cost:.2f} | "
                   f"{chains['speedup']['median']:.2f} |")


def evolving() -> Iterator[str]:
    summary = results.read("staleness_modes")["summary"]
    net = {arm: interval(summary[arm]["over_frozen"]["net_seconds"], 1) for arm in MODES}
    end = {arm: f"{summary[arm]['acceptance_end'][0]:.2f}" for arm in MODES}
    yield f"| {end['frozen']}; it did not fall"
    yield f"| {end['once']} | {net['once']} |"
    yield (f"| {end['every_step']} at every step, {end['every_5']} at every fifth | "
           f"{net['every_step']} at every step, {net['every_5']} at every fifth |")
    yield f"| {end['trigger']} | {net['trigger']} |"
    _, frozen, trained = smollm2()
    yield f"made steps {frozen:.2f} times as fast, one trained every 5 steps [{trained:.2f}"


def train_drafter() -> Iterator[str]:
    for name in ("arithmetic", "gsm8k_1600"):
        actual = list(results.read(f"drafter_{name}_cpu")["held_out"].values())[-1]
        match = ", ".join(f"{actual[f'match/{depth}']:.3f}" for depth in range(4))
        yield f"| {match} | {actual['accept_length/4']:.2f} tokens per round |"


def compile_for() -> Iterator[str]:
    """What 7B needs on v6e:4x4; the table there is written by docs/generate.py."""
    programs = results.read("compile_qwen2_5_7b_v6e_4x4")["programs"]
    (update,) = (x for x in programs if x["program"].startswith("update"))
    resident = update["resident"]
    drafter = sum(x for name, x in resident.items() if name not in ("cache", "published"))
    yield (f"{resident['cache'] / GIB:.2f} GiB a device, published weights "
           f"{resident['published'] / GIB:.2f}, the drafter {drafter / GIB:.2f}.")
    whole = update["peak"] + sum(resident.values())
    yield f"peak of the update itself, {update['peak'] / GIB:.2f} for 4 sequences"
    yield f"that is {whole / GIB:.1f} of {update['limit'] / GIB:.1f} GiB"


PAGES = {"docs/findings.md": [
    *gain(), *staleness(), *bugs(), *losses(),
    *paired("staleness_intervals", "every_1", INTERVALS, ""), *steps(), *controller(),
    *compilers(), *algorithms()],
    "README.md": readme(), "docs/comparison.md": comparison(), "docs/concepts.md": concepts(),
    "experiments/LOG.md": log(), "docs/guides/compare_runs.md": compare_runs(),
    "docs/guides/when_it_pays.md": when_it_pays(), "docs/guides/evolving_drafter.md": evolving(),
    "docs/guides/train_drafter.md": train_drafter(), "docs/compile_for.md": compile_for()}


# A number, with its interval if it has one.
FIGURE = re.compile(r"-?\d+(?:[.,]\d+)*(?: \(-?\d+(?:\.\d+)? \.\. -?\d+(?:\.\d+)?\))?")


@pytest.mark.parametrize(("page", "part"), [
    (page, part) for page, parts in PAGES.items() for part in parts], ids=lambda text: text[:30])
def test_figures_on_a_page_are_their_results(page: str, part: str) -> None:
    """The words around them are free."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert set(FIGURE.findall(part)) - set(FIGURE.findall(text)) == set()
