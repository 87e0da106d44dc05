"""report.html of long, short, incomplete and hostile runs."""

import json
import math
import re
import tracemalloc
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from specrl_jax.config import Config, ConfigError, as_dict
from specrl_jax.metrics import report, report_figures
from specrl_jax.metrics.run_files import Writer, encode
from specrl_jax.runtime.workdir import SAMPLES, write_config

METRICS = {"reward/mean": 0.5, "reward/std": 0.25, "loss": -0.1, "rollout/accept_length": 2.0,
           "rollout/tokens_per_second": 100.0, "rollout/logprob_gap": 1e-6, "time/rollout": 6.0,
           "time/learn": 3.0, "time/reward": 0.5, "time/step": 10.0, "compilations": 0,
           "response/length_mean": 3.0}
SAMPLE = {"prompt_id": 1, "sample_id": 0, "prompt": "1 + 1 =", "completion": "2", "tokens": 3,
          "reward": 1.0, "commits": [3]}


def run(workdir, steps, metrics=METRICS, samples=(SAMPLE,)):
    write_config(workdir, as_dict(Config(name="my <run>")))
    with Writer(workdir, 0) as writer:
        for step in range(steps):
            writer.write_step({"step": step} | metrics, list(samples))
    return workdir


def page(workdir):
    return report.write_report(workdir).read_text(encoding="utf-8")


def figures(html):
    """Label -> SVG root."""
    roots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
    return {root.get("aria-label"): root for root in roots}


def cells(html, heading):
    """First cell, without the metric's name -> the others, of the tables below a heading."""
    section = html.partition(f'<h2 id="{heading}"')[2].partition("<h2 ")[0]
    actual = re.findall(r'<th scope="row">(.*?)(?: <code>.*?</code>)?</th>(.*?)</tr>', section)
    return {name: re.findall("<td>(.*?)</td>", rest) for name, rest in actual}


@pytest.mark.parametrize("steps", [1, 30])
def test_every_figure_is_drawn(tmp_path, steps):
    html = page(run(tmp_path, steps))
    assert list(figures(html)) == [
        "tokens per second", "accept length (tokens per round)", "reward", "response length",
        "log-prob gap, rollout to learner", "loss", "response lengths of all samples",
        "share of each step's time"]
    assert "No figure of" not in html
    numbers = cells(html, "time")
    assert numbers["steps"] == [f"{steps}"]
    assert numbers["tokens"] == [f"{3 * steps}"]  # SAMPLE holds their number
    assert numbers["rollout"] == [f"{6 * steps:.1f}", "60.0 %"]
    assert numbers["other"] == [f"{0.5 * steps:.1f}", "5.0 %"]
    assert cells(html, "config")["learning_rate"] == ["1e-05"]


def test_saved_and_cost_are_sums_of_the_metrics(tmp_path):
    rows = METRICS | {
        "time/startup": 20.0, "time/profiling": 1.0, "time/saved": 3.0, "time/spent": 0.75,
        "time/regret": 0.25, "time/distill": 1.25, "time/speculation_net": 3.5,
        "time/cost_error": 0.05, "drafter/faults": 2}
    html = page(run(tmp_path, 2, rows))
    assert cells(html, "saved") == {
        "rollouts without drafts, predicted": ["18.00", "100.00 %"],  # 2 of 6 and 3
        "rollouts as they were": ["12.00", "66.67 %"],
        "of it, for drafts and verifying them, predicted": ["1.50", "8.33 %"],
        "of it, lost in launches slower than plain ones (regret)": ["0.50", "2.78 %"],
        "saved": ["+6.00", "+33.33 %"],
        "training and checking the drafter": ["-2.50", "-13.89 %"],
        "measuring what rounds cost, at start-up": ["-2.00", "-11.11 %"],
        "saved less costs": ["+1.50", "+8.33 %"]}
    assert "1.50x" in html and "1.18x" in html  # (20 + 6 - 2.5) / 20
    numbers = cells(html, "time")
    assert numbers["seconds of start-up"] == ["40"] and numbers["faults of the drafter"] == ["2"]
    assert ("seconds saved by speculation (estimated) less those spent on the drafter"
            in figures(html))


def test_drafted_tokens_are_told_by_drafter(tmp_path):
    rows = {"rollout/drafted": 40, "rollout/accepted": 10, "draft/eagle/drafted": 30,
            "draft/eagle/accepted": 9, "draft/history/drafted": 10, "draft/history/accepted": 1}
    assert cells(page(run(tmp_path, 2, METRICS | rows)), "saved") == {
        "all": ["80", "20", "25.0 %"], "eagle": ["60", "18", "30.0 %"],
        "history": ["20", "2", "10.0 %"]}


def test_evaluations_are_drawn_and_the_best_told(tmp_path):
    run(tmp_path, 4)
    path, actual = tmp_path / "metrics.jsonl", []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["step"] % 2:
            accuracy = 0.5 if row["step"] == 1 else 0.25
            row |= {"eval/accuracy": accuracy, "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.6,
                    "eval/best_step": 2}
        actual.append(json.dumps(row) + "\n")
    path.write_text("".join(actual))
    html = page(tmp_path)
    assert "held-out accuracy" in figures(html)
    assert "<dd>0.500</dd><dt>best held-out accuracy, after step 2</dt>" in html


def test_reliability_is_pooled_over_steps(tmp_path):
    lines = [[30.0, 0.22, 0.1], [10.0, 0.28, 0.5], [4.0, 1.0, 1.0]]
    html = page(run(tmp_path, 2, METRICS | {report_figures.RELIABILITY: lines}))
    assert "how often drafts were accepted, all steps" in figures(html)
    seen = []
    axes = SimpleNamespace(plot=lambda *a, **k: None, set_ylabel=lambda text: None,
                           scatter=lambda x, y, **k: seen.append((x, y)))
    report_figures.plot_reliability(axes, [{report_figures.RELIABILITY: lines}, {}])
    np.testing.assert_allclose(seen[0], [[0.235, 1.0], [0.2, 1.0]])


def test_page_needs_no_other_file(tmp_path):
    html = page(run(tmp_path, 2))
    links = []

    class Links(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag not in ("script", "link", "img", "iframe") and "src" not in dict(attrs)
            if tag == "a":
                links.append(dict(attrs)["href"])

    Links().feed(html)
    assert links
    assert not re.search(r"url\((?!#)|@import", html)


def test_documentation_is_linked_where_there_is_a_checkout(tmp_path, monkeypatch):
    workdir = run(tmp_path / "runs" / "x", 1)
    pages = [link for link in re.findall(r'href="([^"#:]+)"', page(workdir))]
    assert len(pages) > 4 and all((workdir / link).is_file() for link in pages)
    monkeypatch.setattr(report, "DOCS", tmp_path / "absent")
    html = page(workdir)
    assert not re.findall(r'href="([^"#:]+)"', html) and "<code>docs/metrics.md</code>" in html


def test_long_run_is_drawn_with_few_points(tmp_path):
    launches = {"control/launches": [{"draft_depth": 1.0, "verify_tokens": 4.0, "batch": 2.0}] * 4,
                "time/launches": [{"seconds": 0.1}] * 4, "control/draft_depth": 1.0}
    most = report_figures.MOST_POINTS
    html = page(run(tmp_path, 2 * most + 1, METRICS | launches))
    assert len(html) < 300_000
    np.testing.assert_allclose(report_figures.thinned(np.arange(2.0 * most)),
                               0.5 + np.arange(0, 2 * most, 2))
    some = report_figures.thinned(np.array([math.nan] * 8 + [1.0, math.nan, math.inf, 3.0] * most))
    assert math.isnan(some[0]) and len(some) <= most and np.nanmax(some) <= 3.0


def test_text_is_escaped_and_shortened(tmp_path):
    html = page(run(tmp_path, 1, samples=[SAMPLE | {
        "completion": "<script>alert(1)</script> & more", "prompt": "x" * 5000,
        "tokens": [5, 6, 7, 8]}]))
    assert cells(html, "time")["tokens"] == ["4"]
    assert "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html
    assert "my &lt;run&gt;" in html
    assert "x" * report.TEXT_SHOWN + " ..." in html and "x" * (report.TEXT_SHOWN + 1) not in html


@pytest.mark.parametrize("key, name", [
    ("rollout/accept_length", "accept length (tokens per round)"), ("loss", "loss"),
    ("time/step", "share of each step's time"), ("rollout/logprob_gap", "log-prob gap")])
def test_optional_metrics_may_be_absent(tmp_path, key, name):
    html = page(run(tmp_path, 2, {k: v for k, v in METRICS.items() if k != key}))
    assert f"<code>{key}</code>" in html
    assert not any(title.startswith(name) for title in figures(html))


def test_page_of_required_metrics_alone_is_written(tmp_path):
    html = page(run(tmp_path, 3, {"reward/mean": 0.0}, samples=()))
    assert list(figures(html)) == ["reward"] and "recorded no samples" in html


LAUNCHES = {"control/draft_depth": 1.0, "time/launches": [{"seconds": 0.1}],
            "control/launches": [{"draft_depth": "deep", "verify_tokens": 4.0, "batch": 2.0}]}


@pytest.mark.parametrize("steps, metrics, samples, words", [
    (1, {"loss": 1.0}, [SAMPLE], ["metrics.jsonl", "'reward/mean'", "step 0"]),
    (1, METRICS, [{"reward": 1.0}], ["samples.jsonl", "'prompt_id'", "step 0"]),
    (1, METRICS | LAUNCHES, [SAMPLE], ["draft_depth = 'deep'", "step 0"]),
    (0, METRICS, [SAMPLE], ["metrics.jsonl", "no steps"])])
def test_files_without_what_the_report_needs_are_refused(tmp_path, steps, metrics, samples, words):
    with pytest.raises(ConfigError) as error:
        page(run(tmp_path, steps, metrics, samples))
    assert all(word in str(error.value) for word in words)
    assert not (tmp_path / report.REPORT).exists()


def test_report_of_nan_metrics_is_written(tmp_path):
    html = page(run(tmp_path, 2, METRICS | {"loss": math.nan, "reward/mean": math.nan}))
    assert "<dd>nan → nan</dd>" in html and "<code>loss</code>" in html


def test_samples_alternate_best_and_worst_of_the_last_step(tmp_path):
    samples = [SAMPLE | {"step": s, "sample_id": i, "reward": r, "tokens": [7] * (i + 1)}
               for s, rewards in ((0, [9.0]), (1, [0.0, 1.0, 0.25, 0.5]))
               for i, r in enumerate(rewards)]
    (tmp_path / SAMPLES).write_text("".join(map(encode, samples)))
    lengths, latest = report.summarize(tmp_path)
    assert [s["reward"] for s in report.pick_samples(latest)] == [1.0, 0.0, 0.5, 0.25]
    assert lengths == {1: 2, 2: 1, 3: 1, 4: 1}


def test_samples_are_read_one_by_one(tmp_path, monkeypatch):
    """Of 100,000 samples, only those of one step are held."""
    samples = (SAMPLE | {"step": i // 100, "completion": "x" * 1000} for i in range(100_000))
    monkeypatch.setattr(report, "read_samples", lambda workdir: samples)
    tracemalloc.start()
    lengths, latest = report.summarize(tmp_path)
    assert lengths.total() == 100_000 and len(latest) == 100
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
