"""Writes docs/config.md and docs/metrics.md from the help of fields and metrics, the examples of
tests/extending into docs/extending.md, what presets were compiled for into docs/compile_for.md,
runs of all algorithms into docs/findings.md, the accept lengths that pay into
docs/guides/when_it_pays.md, and the README's badges from pyproject.toml and constraints.txt.

    python docs/generate.py

tests/test_docs.py fails while a page is older than its source.
"""

import ast
import dataclasses
import json
import re
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specrl_jax.config import Config
from specrl_jax.config.load import preset_targets
from specrl_jax.config.rl import ALGORITHMS, OF_ALGORITHM
from specrl_jax.metrics.names import METRICS

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "experiments" / "results"
NOTE = "<!-- Written by docs/generate.py: change the help in the code and run it. -->"
SECTIONS = {  # of the metrics' page, by the part before the "/" of the first metric of each
    "step": "Step and reward", "loss": "Learning", "response": "Responses, rollouts and drafts",
    "control": "The controller", "eval": "Evaluation", "time": "Time",
    "memory": "Memory, programs and versions", "drafter": "The drafter's health and training"}


def pages() -> dict[str, str]:
    """Returns the text of each generated page by file name."""
    return {"config.md": config_page(), "metrics.md": metrics_page(),
            "extending.md": extending_page(), "compile_for.md": compile_for_page(),
            "findings.md": findings_page(), "guides/when_it_pays.md": when_it_pays_page(),
            **{f"images/badge_{name}.svg": badge(name, text) for name, text in badges().items()}}


def config_page() -> str:
    lines = ["# Configuration", "", NOTE, "",
             "This page lists every field of the configuration. A field is a flag, as in "
             "`--config.rl.kl=0.1`, and an argument of `load_config`, as in "
             "`load_config(\"tiny\", rl__kl=0.1)`. Defaults are those of `Config()`; presets "
             "change some of them. Kernels have no field: "
             "[the platform decides](architecture.md#platforms).", ""]
    fields = dataclasses.fields(Config)
    sections = [f for f in fields if dataclasses.is_dataclass(_default(f))]
    lines += ["## Run", "", *_fields(f for f in fields if f not in sections), ""]
    for field in sections:
        lines += [f"## {field.name}: {field.metadata['help']}", "",
                  *_fields(dataclasses.fields(type(_default(field))), f"{field.name}."), ""]
    # Fields that an algorithm is described by only where it changes them.
    unnamed = {f"rl.{field}": getattr(Config().rl, field) for field in OF_ALGORITHM
               if field not in ("advantage", "loss", "normalize")}
    lines += ["## Presets", "",
              "A preset is a file in `specrl_jax/config/presets`, or one of your own: "
              "`--config=my_preset.py`. `python experiments/train.py --config=NAME --help` prints "
              "its values. A target behind the colon, as in `--config=qwen2_5_7b:v6e_4x4`, sets "
              "mesh, rows, micro-batch and remat for that device; other targets need "
              "`--config.mesh.data=...` and so on.", "",
              "| preset | | targets |", "| --- | --- | --- |",
              *(_row(f"`{name}`", text, ", ".join(f"`{x}`" for x in preset_targets(name)))
                for name, text in presets().items()), "",
              "## Algorithms", "",
              "A name behind the colon of any preset sets these fields, as in "
              "`--config=smollm2:dapo`, and of "
              f"{', '.join(f'`{field}`' for field in unnamed)} "
              "those that it does not list to their defaults. Other flags win over it. None sets "
              "`rl.kl`. With one update on a rollout every ratio is 1 and most losses have the "
              "same gradient, so those with a ratio take two `rl.minibatches`.", "",
              "| algorithm | fields |", "| --- | --- |"]
    lines += [_row(f"`{name}`", ", ".join(f"`{field}={x}`" for field, x in values.items()
                                          if field not in unnamed or x != unnamed[field]))
              for name, values in ALGORITHMS.items()]
    return "\n".join([*lines, ""])


def presets() -> dict[str, str]:
    """Returns the first line of each preset's docstring by its name."""
    folder = DOCS.parent / "specrl_jax" / "config" / "presets"
    texts = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
             for path in sorted(folder.glob("[a-z]*.py"))}
    return {name: (text or "").splitlines()[0] for name, text in texts.items()}


def metrics_page() -> str:
    lines = ["# Metrics", "", NOTE, "",
             "This page lists every metric. Each line of `metrics.jsonl` has those of one step; "
             "TensorBoard shows those that are numbers. A `*` stands for a name. The last two "
             "columns give the metric of [TRL](https://github.com/huggingface/trl)'s GRPO trainer "
             "and of [verl](https://github.com/verl-project/verl) that means the same.", "",
             "Does speculation pay? `time/saved` is the answer of one step, in seconds, and "
             "`time/speculation_net` the running sum after what the drafter costs, for a drafter "
             "with weights: positive means faster than plain decoding. "
             "`rollout/accept_length` says how many tokens a row gains per round, not how long "
             "the round is. [When it pays](guides/when_it_pays.md) reads them."]
    titles = dict(SECTIONS)
    for m in METRICS:
        if title := titles.pop(m.name.partition("/")[0], ""):
            lines += ["", f"## {title}", "", "| metric | unit | meaning | TRL | verl |",
                      "| --- | --- | --- | --- | --- |"]
        lines.append(_row(f"`{m.name}`", m.unit, m.help, _code(m.trl), _code(m.verl)))
    return "\n".join([*lines, ""])


def extending_page() -> str:
    """Returns the page with each block below `<!-- FILE -->` replaced by that file."""
    page = (DOCS / "extending.md").read_text(encoding="utf-8")

    def quote(match: re.Match[str]) -> str:
        text = (DOCS.parent / match[1]).read_text(encoding="utf-8")
        return f"<!-- {match[1]} -->\n```{match[2]}\n{text}```\n"

    return re.sub(r"^<!-- (\S+) -->\n```(\w+)\n.*?^```\n", quote, page, flags=re.M | re.S)


def compile_for_page() -> str:
    """Returns the page with the table of experiments/results/compile_PRESET_TARGET.json."""
    return _filled("compile_for.md", "matrix", [
        "| preset | target, JAX | data x fsdp x tensor | programs | most memory, GiB | "
        "launch | update | minutes |", "|" + " --- |" * 8,
        *(_compiled(json.loads(file.read_text(encoding="utf-8")))
          for file in sorted(RESULTS.glob("compile_*.json")))])


def findings_page() -> str:
    """Returns the page with the table of runs of all algorithms."""
    named, own = (json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
                  for name in ("bench_algorithms_smollm2", "smollm2_seeds_cpu"))
    return _filled("findings.md", "algorithms", [
        "| run | reward, first 5 steps | last 5 | held-out accuracy | accept length |",
        "|" + " --- |" * 5,
        *(_trained(f"presets' own, seed {seed}", _of_seed(case))
          for seed, case in own["seeds"].items()),
        *(_trained(f"`{name}`", case) for name, case in named["cases"].items())])


def badges() -> dict[str, str]:
    """Returns the text of each badge by its label."""
    root = DOCS.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = re.findall(r"^jax==([\d.]+)", (root / "constraints.txt").read_text("utf-8"), re.M)
    return {"version": project["version"], "licence": project["license"],
            "python": project["requires-python"].replace(">=", "") + " and later",
            "jax": " and ".join(pins)}


def badge(label: str, text: str) -> str:
    """Returns a badge as SVG."""
    left, right = 7 * len(label) + 14, 6.6 * len(text) + 16
    style = 'fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right:.0f}" height="20">'
            f"<title>{label}: {text}</title>"
            f'<rect width="{left}" height="20" fill="#555"/>'
            f'<rect x="{left}" width="{right:.0f}" height="20" fill="#2166ac"/>'
            f'<text x="{left / 2}" y="14" {style}>{label}</text>'
            f'<text x="{left + right / 2:.0f}" y="14" {style}>{text}</text></svg>\n')


def _compiled(result: Mapping[str, Any]) -> str:
    """Returns the row of one result."""
    config, programs = result["config"], result["programs"]
    mesh, gib = config["mesh"], 2**30
    found = [p for p in programs if "error" not in p]
    whole = {p["program"]: p["peak"] + sum(p["resident"].values()) for p in found}
    most = max(whole, key=whole.__getitem__)
    own = {p["program"].split()[0]: p["temporaries"] for p in reversed(found)}  # the largest batch
    return _row(
        f"`{config['name']}`", f"{result['target']}, {result['versions']['jax']}",
        f"{mesh['data']}x{mesh['fsdp']}x{mesh['tensor']}",
        "; ".join(result["failures"]) or f"all {len(programs)}",
        f"{whole[most] / gib:.1f} of {found[0]['limit'] / gib:.1f}, {most}",
        f"{own['launch'] / result['resident']['cache']:.0%}", f"{own['update'] / gib:.1f}",
        f"{sum(p['compile_seconds'] + p['lowering_seconds'] for p in found) / 60:.0f}")


def _trained(name: str, case: Mapping[str, Any]) -> str:
    """Returns the row of one run."""
    return _row(name, *(f"{case[key]:.2f}" for key in ("reward_first", "reward_last")),
                f"{case['accuracy']:.3f} ({case['accuracy_low']:.3f} .. "
                f"{case['accuracy_high']:.3f})",
                f"{case['accept_length']:.2f}")


def _of_seed(case: Mapping[str, Any]) -> dict[str, float]:
    """Returns a run of the preset's own algorithm, as the other result has them."""
    low, high = case["greedy"]["after_interval_wilson"]
    return {"reward_first": case["reward_exact_first_five_steps"],
            "reward_last": case["reward_exact_last_five_steps"],
            "accuracy": case["greedy"]["after"], "accuracy_low": low, "accuracy_high": high,
            "accept_length": statistics.mean(case["accept_length_by_step"])}


def when_it_pays_page() -> str:
    """Returns the page with the accept lengths of experiments/results/when_it_pays.json."""
    result = json.loads((RESULTS / "when_it_pays.json").read_text(encoding="utf-8"))
    cases = {name: case["accept_length"] for name, case in result["cases"].items()}
    rows = list(next(iter(next(iter(cases.values())).values())))
    return _filled("guides/when_it_pays.md", "pays", [
        _row("model, chips", "nodes, context", *(f"{n} rows" for n in rows)),
        "|" + " --- |" * (2 + len(rows)),
        *(_row(case, name, *(f"{by_rows[n]:.1f}" for n in rows))
          for case, lengths in cases.items() for name, by_rows in lengths.items())])


def _filled(page: str, marker: str, lines: Iterable[str]) -> str:
    """Returns a page with lines instead of those between `<!-- MARKER -->` and `<!-- end -->`."""
    return re.sub(rf"(<!-- {marker} -->\n).*?(<!-- end -->\n)",
                  lambda match: match[1] + "\n".join([*lines, match[2]]),
                  (DOCS / page).read_text(encoding="utf-8"), flags=re.S)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING
    return field.default_factory()


def _fields(fields: Iterable[dataclasses.Field[Any]], above: str = "") -> Iterator[str]:
    yield from ("| field | default | meaning |", "| --- | --- | --- |")
    for field in fields:
        default = _default(field)
        yield _row(f"`{above}{field.name}`", "" if default == "" else f"`{default}`",
                   field.metadata["help"])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    name, _, remark = text.partition(" (")
    return (f"`{name}`" if name else "") + (f" ({remark}" if remark else "")


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
