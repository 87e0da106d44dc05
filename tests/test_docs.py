"""Generated pages are up to date."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from absl import flags

from experiments import config_flags
from specrl_jax.config import as_dict, load_config
from specrl_jax.io.datasets import DATASETS
from specrl_jax.io.trackers import TRACKERS
from specrl_jax.rl.reward import REWARDS

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS.parent / "experiments" / "results"
spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", ["config.md", "metrics.md", "extending.md", "compile_for.md"])
def test_page_is_what_its_source_generates(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == generate.pages()[name], "run python docs/generate.py"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("compile_*.json")), ids=lambda f: f.stem)
def test_result_is_of_the_preset_as_it_is(file):
    """After a change of a preset's table: run compile_for.py with --out=FILE again."""
    result = json.loads(file.read_text(encoding="utf-8"))
    name, target = result["config"]["name"], result["target"].replace(":", "_")
    assert file.stem.removesuffix("_newest") == f"compile_{name}_{target}"
    now = json.loads(json.dumps(as_dict(load_config(f"{name}:{target}"))))
    for section in ("mesh", "model", "spec", "draft", "rollout", "learner", "distill"):
        was = result["config"][section]
        assert {field: now[section].get(field) for field in was} == was, section


def test_pages_name_fields_and_metrics():
    pages = generate.pages()
    assert "| `rl.kl` | `0.0` | coefficient of the KL" in pages["config.md"]
    assert "| `learner.kl` | `rl.kl` |" in pages["config.md"]
    assert "| `rloo` | `rl.advantage=leave_one_out`, " in pages["config.md"]
    assert "`completions/mean_length`" in pages["metrics.md"]


COMMANDS = re.findall(r"^python experiments/train.py .*$", (DOCS / "data.md").read_text(), re.M)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-30:])
def test_command_of_the_data_page_has_fields_that_exist(command):
    values = flags.FlagValues()
    argv = shlex.split(command)[1:]
    config_flags.define(argv, values)
    values(argv)
    config, _ = config_flags.parsed(values)
    DATASETS[config.data.name], REWARDS[config.reward.terms[0]]
    assert set(config.track.to) <= set(TRACKERS)
