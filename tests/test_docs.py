"""Pages and pictures are up to date, in the navigation, and name what exists."""

import argparse
import ast
import functools
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from absl import flags

import specrl_jax
from experiments import config_flags
from specrl_jax.checkpoint import resume
from specrl_jax.config import Config, as_dict, load_config
from specrl_jax.data.datasets import DATASETS
from specrl_jax.metrics.trackers import TRACKERS
from specrl_jax.rewards.reward import REWARDS

DOCS = Path(__file__).resolve().parents[1] / "docs"
ROOT = DOCS.parent
RESULTS = ROOT / "experiments" / "results"


def module_of(path: Path) -> ModuleType:
    """Returns a file of Python as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name: str) -> ModuleType:
    """Returns a script of docs/ as a module."""
    return module_of(DOCS / f"{name}.py")


generate, check = script("generate"), script("check")
WRITTEN = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
HISTORY = ("CHANGELOG.md", "experiments/LOG.md")  # whose commands are of their time
# Options that are newer than some results, whose heads lack the norms.
NEWER = {"draft": {"tap_norm", "state_norm"}, "distill": {"explore"}}
OUTSIDE = ast.literal_eval(re.search(r"^PAGES = (\{.*?\})$", (DOCS / "hooks.py").read_text(),
                                     re.M | re.S)[1])  # mkdocs, which hooks.py imports, is an extra
PAGES = [*(f"docs/{page}" for page in WRITTEN), *OUTSIDE]
LINK = re.compile(r"(?<!`)\[[^\[\]]*\]\(([^()\s#:]+)(?:#[^()\s]*)?\)")


@pytest.mark.parametrize("name", [
    "config.md", "metrics.md", "extending.md", "compile_for.md", "guides/when_it_pays.md",
    *(f"images/badge_{name}.svg" for name in ("version", "licence", "python", "jax"))])
def test_page_is_what_its_source_generates(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == generate.pages()[name], "run python docs/generate.py"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("compile_*.json")), ids=lambda f: f.stem)
def test_result_is_of_the_preset_as_it_is(file):
    """After a change of a preset's table: run compile_for.py with --out=FILE again. A field that
    is newer than the result had its default then."""
    result = json.loads(file.read_text(encoding="utf-8"))
    name, target = result["config"]["name"], result["target"].replace(":", "_")
    assert file.stem.removesuffix("_newest") == f"compile_{name}_{target}"
    now, default = (json.loads(json.dumps(as_dict(config)))
                    for config in (load_config(f"{name}:{target}"), Config()))
    for section in ("mesh", "model", "spec", "draft", "rollout", "learner", "distill"):
        was = default[section] | result["config"][section]
        assert now[section] == {field: was[field] for field in now[section]}, section


def test_navigation_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = list(check.leaves(check.yaml.safe_load(text)["nav"]))
    assert sorted(pages) == sorted([*WRITTEN, *OUTSIDE.values()])


def test_api_page_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert [x for x in specrl_jax.__all__ if not re.search(rf"(`|specrl_jax\.){x}\b", text)] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [x for x in LINK.findall(text) if not (ROOT / page).parent.joinpath(x).exists()] == []


def test_table_of_what_a_resume_may_change_is_complete() -> None:
    text = (DOCS / "guides" / "resume.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", text.partition("## What may change")[2], re.M)[1:]
    named = {effect.startswith("refused"): set() for _, effect in rows}
    for names, effect in rows:
        named[effect.startswith("refused")].update(re.findall(r"`([\w.]+)`", names))
    may_change = {*resume.FREE, *resume.EQUAL, resume.STOPPED[0]}
    assert may_change <= named[False] <= {*may_change, json.loads(resume.STOPPED[1])}
    assert resume.RULE in named[True] and named[True].isdisjoint({*resume.FREE, *resume.EQUAL})


SCRIPTS = ("compare_runs", "compile_for", "deploy", "eval", "explain", "export", "generate",
           "plan", "sft", "train", "train_drafter")
CALL = re.compile(rf"\bpython experiments/({'|'.join(SCRIPTS)})\.py "
                  r"""((?:"[^"]*"|'[^']*'|[^"'`|&;)#\n])*)""")
INLINE = re.compile(rf"`(?:experiments/)?({'|'.join(SCRIPTS)})\.py ([^`\n]*)`")
GIVEN = {"--config=PRESET": "--config=tiny", "--config=NAME": "--config=tiny",
         "--step=N": "--step=1"}
COMMANDS = sorted({(script, arguments.strip()) for page in PAGES if page not in HISTORY
                   for text in [(ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")]
                   for found in (CALL, INLINE) for script, arguments in found.findall(text)})


def test_pages_have_commands_of_every_script() -> None:
    assert {script for script, _ in COMMANDS} == {*SCRIPTS}


class ParsedError(Exception):
    """Ends a script where its arguments are parsed."""


@pytest.mark.parametrize(("name", "arguments"), COMMANDS,
                         ids=lambda text: text[-30:])
def test_command_of_a_page_has_flags_and_fields_that_exist(
        name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [GIVEN.get(x, x) for x in shlex.split(arguments) if x != "--help" and x[0] != "$"]
    values, argv = flags.FlagValues(), [f"{name}.py", *parts]
    module = with_flags_in(values, name, monkeypatch)
    if hasattr(module, "argparse"):
        original = argparse.ArgumentParser.parse_args

        def parse(*given: Any) -> NoReturn:
            original(*given)
            raise ParsedError

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
        with pytest.raises(ParsedError):
            module.main(parts)
        return
    config_flags.define(argv, values)
    assert values(argv)[1:] == []
    if "run" in values and values["run"].value:
        return  # a run's config
    config, _ = config_flags.parsed(values)
    for registry, names in ((DATASETS, [config.data.name]), (REWARDS, config.reward.terms),
                            (TRACKERS, config.track.to)):
        assert all(":" in name or name in registry for name in names)


def with_flags_in(values: flags.FlagValues, name: str, monkeypatch: pytest.MonkeyPatch
                  ) -> ModuleType:
    """Returns a script of experiments/ as a module that defines its flags in `values`."""
    with monkeypatch.context() as patch:
        for kind in ("bool", "boolean", "enum", "float", "integer", "list", "string"):
            define = getattr(flags, f"DEFINE_{kind}")
            patch.setattr(flags, f"DEFINE_{kind}", functools.partial(define, flag_values=values))
        patch.setitem(sys.modules, "run_flags", module_of(ROOT / "experiments" / "run_flags.py"))
        return module_of(ROOT / "experiments" / f"{name}.py")
