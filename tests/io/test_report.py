"""report.html of long, short, incomplete and hostile runs."""

import base64
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
from specrl_jax.io import report
from specrl_jax.io.metrics import SAMPLES, Writer, encode, write_config

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
    """alt text -> SVG root."""
    found = re.findall(r'<img alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]*)"', html)
    return {name: ElementTree.fromstring(base64.b64decode(data)) for name, data in found}


@pytest.mark.parametrize("steps", [1, 30])
def test_every_figure_is_drawn(tmp_path, steps):
    html = page(run(tmp_path, steps))
    assert list(figures(html)) == [
        "reward", "tokens per second", "accept length (tokens per round)",
        "share of each step&#39;s time", "response length", "log-prob gap, rollout to learner",
        "loss", "histogram"]
    assert "No figure of" not in html
    assert f"<td>steps</td><td>{steps}</td>" in html
    assert f"<td>tokens</td><td>{3 * steps}</td>" in html  # SAMPLE holds their number
    assert "<td>learner.learning_rate</td><td>1e-05</td>" in html


def test_report_optional_totals_are_told(tmp_path):
    rows = METRICS | {
        "time/startup": 20.0, "time/profiling": 1.0, "time/saved": 3.0,
        "time/distill": 1.25, "time/speculation_net": 3.5, "drafter/faults": 2}
    html = page(run(tmp_path, 2, rows))
    assert "<td>seconds of start-up</td><td>40</td>" in html
    assert "of start-up and steps</td><td>3.3%</td>" in html  # 2 of 2 * (20 + 10)
    assert "<td>seconds saved by speculation, predicted</td><td>6.0</td>" in html
    assert "<td>seconds spent on the drafter</td><td>2.5</td>" in html
    assert "<td>saved less spent</td><td>+3.5</td>" in html
    assert "<td>faults of the drafter</td><td>2</td>" in html and "regret" not in html
    assert ("seconds saved by speculation (estimated) less those spent on the drafter"
            in figures(html))


def test_evaluations_are_drawn_and_the_best_told(tmp_path):
    run(tmp_path, 4)
    path, found = tmp_path / "metrics.jsonl", []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["step"] % 2:
            accuracy = 0.5 if row["step"] == 1 else 0.25
            row |= {"eval/accuracy": accuracy, "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.6,
                    "eval/best_step": 2}
        found.append(json.dumps(row) + "\n")
    path.write_text("".join(found))
    html = page(tmp_path)
    assert "held-out accuracy" in figures(html)
    assert "<td>held-out accuracy, best</td><td>0.500 after step 2</td>" in html


def test_reliability_is_pooled_over_steps(tmp_path):
    lines = [[30.0, 0.22, 0.1], [10.0, 0.28, 0.5], [4.0, 1.0, 1.0]]
    html = page(run(tmp_path, 2, METRICS | {report.RELIABILITY: lines}))
    assert "reliability" in figures(html)
    seen = []
    axes = SimpleNamespace(plot=lambda *a, **k: None, set_ylabel=lambda text: None,
                           scatter=lambda x, y, **k: seen.append((x, y)))
    report.plot_reliability(axes, [{report.RELIABILITY: lines}, {}])
    np.testing.assert_allclose(seen[0], [[0.235, 1.0], [0.2, 1.0]])


def test_page_needs_no_other_file(tmp_path):
    html = page(run(tmp_path, 2))
    links = []

    class Links(HTMLParser):
        def handle_starttag(self, tag, attrs):
            links.extend(v for k, v in attrs if k in ("src", "href"))
            assert tag not in ("script", "link")

    Links().feed(html)
    assert links and all(link.startswith("data:") for link in links)


def test_text_is_escaped_and_shortened(tmp_path):
    html = page(run(tmp_path, 1, samples=[SAMPLE | {
        "completion": "<script>alert(1)</script> & more", "prompt": "x" * 5000,
        "tokens": [5, 6, 7, 8]}]))
    assert "<td>tokens</td><td>4</td>" in html
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


@pytest.mark.parametrize("metrics, samples, words", [
    ({"loss": 1.0}, [SAMPLE], "metrics.jsonl: 'reward/mean' is missing in step 0"),
    (METRICS, [{"reward": 1.0}], "samples.jsonl: 'prompt_id' is missing in step 0"),
])
def test_missing_requirements_are_named(tmp_path, metrics, samples, words):
    with pytest.raises(ConfigError, match=words):
        page(run(tmp_path, 1, metrics, samples))
    assert not (tmp_path / report.REPORT).exists()


def test_report_without_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="metrics.jsonl: no steps"):
        page(run(tmp_path, 0))
    with pytest.raises(ConfigError, match="metrics.jsonl: no steps"):
        page(tmp_path / "absent")


def test_report_of_nan_metrics_is_written(tmp_path):
    html = page(run(tmp_path, 2, METRICS | {"loss": math.nan, "reward/mean": math.nan}))
    assert "<td>nan, nan</td>" in html and "<code>loss</code>" in html


def test_samples_alternate_best_and_worst_of_the_last_step(tmp_path):
    samples = [SAMPLE | {"step": s, "sample_id": i, "reward": r, "tokens": [7] * (i + 1)}
               for s, rewards in ((0, [9.0]), (1, [0.0, 1.0, 0.25, 0.5]))
               for i, r in enumerate(rewards)]
    (tmp_path / SAMPLES).write_text("".join(map(encode, samples)))
    found = report.summarize(tmp_path)
    assert [s["reward"] for s in report.pick_samples(found.last)] == [1.0, 0.0, 0.5, 0.25]
    assert found.lengths == {1: 2, 2: 1, 3: 1, 4: 1}


def test_samples_are_read_one_by_one(tmp_path, monkeypatch):
    """Of 100,000 samples, only those of one step are held."""
    samples = (SAMPLE | {"step": i // 100, "completion": "x" * 1000} for i in range(100_000))
    monkeypatch.setattr(report, "read_samples", lambda workdir: samples)
    tracemalloc.start()
    found = report.summarize(tmp_path)
    assert found.lengths.total() == 100_000 and len(found.last) == 100
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
