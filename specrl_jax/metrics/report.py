"""report.html: one page about a run that needs no other file and no network."""

import collections
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from specrl_jax.config import ConfigError
from specrl_jax.metrics.report_figures import MOST_POINTS, Rows, figures
from specrl_jax.metrics.report_numbers import account, drafts, highlights, last, phases, totals
from specrl_jax.metrics.run_files import check_sample, read_metrics, read_samples
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.workdir import METRICS, REPORT, flat, read_config
from specrl_jax.structs import Json

PAGE = Path(__file__).with_name("report_page.html")  # the template: sections and their sentences
DOCS = Path(__file__).parents[2] / "docs"  # of a checkout; an installed package has none
REQUIRED = ("step", "reward/mean")
SHOWN = {"prompt_id": int, "sample_id": int, "prompt": str, "completion": str,
         "tokens": (list, int), "reward": (int, float)}  # of a sample
SAMPLES_SHOWN, TEXT_SHOWN = 8, 1200


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
    lengths, latest = summarize(workdir)
    config = read_config(workdir) or {}
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined,
                                  trim_blocks=True, lstrip_blocks=True)
    html = template.from_string(PAGE.read_text(encoding="utf-8")).render(
        name=config.get("name", workdir.name), rows=rows, highlights=highlights(rows),
        totals=totals(rows, lengths), account=account(rows), drafts=drafts(rows),
        phases=phases(rows), figures=figures(rows, lengths),
        samples=pick_samples(latest), block=-(-len(rows) // MOST_POINTS),
        config=by_section(config), rule=flat(config).get("spec.rule"),
        lossy=last(rows, "spec/lossy") > 0,
        docs=os.path.relpath(DOCS, workdir) if DOCS.is_dir() else "")
    write_atomically(workdir / REPORT, html)
    return workdir / REPORT


def summarize(workdir: Path) -> tuple[collections.Counter[int], Rows]:
    """Returns how many responses of a run have each length, and the samples of its last step. It
    reads samples one by one: all of them may be gigabytes."""
    lengths, latest = collections.Counter[int](), list[Mapping[str, Any]]()
    for sample in read_samples(workdir):
        check_sample(workdir, sample, SHOWN)
        if not sample.get("learned", True):
            continue
        tokens = sample["tokens"]  # or their number
        lengths[len(tokens) if isinstance(tokens, list) else tokens] += 1
        if latest and latest[0]["step"] != sample["step"]:
            latest.clear()
        latest.append(sample)
    return lengths, latest


def by_section(config: Json) -> dict[str, list[tuple[str, Any]]]:
    """Returns the fields of a configuration by section, those outside sections under ""."""
    sections: dict[str, list[tuple[str, Any]]] = {"": []}
    for name, value in sorted(flat(config).items()):
        section, _, field = name.rpartition(".")
        sections.setdefault(section, []).append((field, value))
    return sections


def pick_samples(latest: Rows) -> Rows:
    """Returns a few shortened completions of the last step, alternately the best and the worst."""
    ranked = sorted(latest, key=lambda s: (-s["reward"], s["sample_id"]))
    chosen = [ranked[i // 2] if i % 2 == 0 else ranked[-1 - i // 2] for i in range(len(ranked))]
    return [{**s} | {name: s[name] if len(s[name]) <= TEXT_SHOWN else s[name][:TEXT_SHOWN] + " ..."
                 for name in ("prompt", "completion")} for s in chosen[:SAMPLES_SHOWN]]
