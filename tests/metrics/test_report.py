"""report.html of long, short, incomplete and hostile runs."""

import math
import re
import tracemalloc

import pytest

from specrl_jax.config import Config, ConfigError, as_dict
from specrl_jax.metrics import report, report_figures
from specrl_jax.metrics.run_files import Writer
from specrl_jax.runtime.workdir import write_config

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


def cells(html, heading):
    """First cell, without the metric's name -> the others, of the tables below a heading."""
    section = html.partition(f'<h2 id="{heading}"')[2].partition("<h2 ")[0]
    actual = re.findall(r'<th scope="row">(.*?)(?: <code>.*?</code>)?</th>(.*?)</tr>', section)
    return {name: re.findall("<td>(.*?)</td>", rest) for name, rest in actual}


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


def test_long_run_is_drawn_with_few_points(tmp_path):
    launches = {"control/launches": [{"draft_depth": 1.0, "verify_tokens": 4.0, "batch": 2.0}] * 4,
                "time/launches": [{"seconds": 0.1}] * 4, "control/draft_depth": 1.0}
    most = report_figures.MOST_POINTS
    html = page(run(tmp_path, 2 * most + 1, METRICS | launches))
    assert len(html) < 300_000


@pytest.mark.parametrize("changes", [
    {}, dict.fromkeys(METRICS), {"loss": math.nan, "reward/mean": math.nan}], ids=str)
def test_sums_are_told_and_metrics_may_be_absent_or_nan(tmp_path, changes):
    rows = {k: v for k, v in (METRICS | changes).items() if v is not None}
    html = page(run(tmp_path, 2, {"reward/mean": 0.0} | rows))
    numbers = cells(html, "time")
    assert (numbers["steps"], numbers["tokens"]) == (["2"], ["6"])  # SAMPLE holds their number
    assert "time/step" not in rows or numbers["rollout"] == ["12.0", "60.0 %"]
    assert cells(html, "config")["learning_rate"] == ["1e-05"]
    assert html.count("<svg") == {0: 8, len(METRICS): 2, 2: 6}[len(changes)]
    assert not re.search(r"""url\((?!#)|@import|<script|<link|<img|\bsrc=""", html), "other files"


def test_text_is_escaped_and_shortened(tmp_path):
    html = page(run(tmp_path, 1, samples=[SAMPLE | {
        "completion": "<script>alert(1)</script> & more", "prompt": "x" * 5000,
        "tokens": [5, 6, 7, 8]}]))
    assert cells(html, "time")["tokens"] == ["4"]
    assert "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html
    assert "my &lt;run&gt;" in html
    assert "x" * report.TEXT_SHOWN + " ..." in html and "x" * (report.TEXT_SHOWN + 1) not in html


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


def test_samples_are_read_one_by_one(tmp_path, monkeypatch):
    """Of 100,000 samples, only those of one step are held."""
    samples = (SAMPLE | {"step": i // 100, "completion": "x" * 1000} for i in range(100_000))
    monkeypatch.setattr(report, "read_samples", lambda workdir: samples)
    tracemalloc.start()
    lengths, latest = report.summarize(tmp_path)
    assert lengths.total() == 100_000 and len(latest) == 100
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
