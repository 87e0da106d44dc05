"""Configs from presets and dicts; what cannot work is refused in a line that names it."""

from pathlib import Path
from typing import Any

import pytest

from specrl_jax.config import Config, ConfigError, as_dict, load_config, override
from specrl_jax.model.source import run_config
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.runtime.workdir import write_config

BOTH = "from specrl_jax.config import Config, SpecOptions\n"


@pytest.mark.parametrize("changes, line", [
    ({"spec.depths": 2}, "spec.depths = 2: no such field"),
    ({"rl": 3}, "rl = 3: must be an object with fields"),
    ({"seed": "x"}, "seed = 'x': must be of type int"),
    ({"reward.terms": "exact"}, "reward.terms = 'exact': must be a tuple"),
    ({"mesh.fallback": ("2x2",)}, "mesh.fallback = '2x2': give data x fsdp x tensor, such as"),
    ({"mesh.fallback": ("1x1x1", "3x1x2")},
     "rollout.batch_size = 64: must be a multiple of the 3 data shards (mesh.fallback 3x1x2)"),
])
def test_bad_values_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        override(Config(), changes)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


@pytest.mark.parametrize("text, words", [
    (BOTH + "def get_config(): return Config(spec=SpecOptions(steps=2))", r"'steps' \(line 2\)$"),
    ("def get_config(): return 3", r"returns a int: return a specrl_jax\.Config$"),
    ("x = 3", r"has no get_config\(\): define it in .*mine\.py$"),
    ("def get_config(: pass", r"invalid syntax .*: correct .*mine\.py$"),
])
def test_presets_that_cannot_be_read_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        load_config(str(tmp_path / "mine.py"))
    assert "\n" not in str(error.value)


def test_config_of_a_run_is_the_one_that_was_written(tmp_path: Path) -> None:
    config = load_config("tiny", rl__kl=0.1)
    assert config == load_config("tiny", **{"rl.kl": 0.1}) and config.rl.kl == 0.1
    write_config(tmp_path, as_dict(config))
    assert run_config(tmp_path) == config


@pytest.mark.parametrize("changes, message", [
    ({"model__family": "nope"}, "model.family = 'nope': choose one of llama"),
    ({"control__policy": "nope", "spec__drafter": "off"}, "control.policy = 'nope': choose one of"),
    ({"spec__drafter": "nope", "control__policy": "off"}, "spec.drafter = 'nope': choose one of"),
    ({"draft__parts": ("eagle", "nope")}, "draft.parts = 'nope': choose one of"),
    ({"control__policy": "builtins:print"}, "control.policy = .*: must make a Controller"),
    ({"spec__drafter": "builtins:print"}, "spec.drafter = .*: must make a DrafterPart")])
def test_unknown_extension_is_refused_even_if_unused(
        changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampler.from_config(load_config("tiny", **changes), prompts=1)
