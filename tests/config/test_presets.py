"""Presets of published models: a table of targets, and what follows a preset's colon."""

import dataclasses
from pathlib import Path

import pytest

from specrl_jax.config import (
    Config,
    ConfigError,
    load,
    load_config,
    override,
    preset_names,
    preset_targets,
)

PRESET = """
from specrl_jax.config import Config
TARGETS = {"v6e_4x4": {"mesh.fsdp": 2, "steps": 3}, "h100": {"steps": 4}}
def get_config():
    return Config(name="mine")
"""
PAIRS = [(name, target) for name in preset_names() for target in preset_targets(name)]


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_preset_fills_each_of_its_targets(name: str, target: str) -> None:
    config = load_config(f"{name}:{target}")
    devices = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    kind, _, shape = target.partition("_")
    wanted = 1
    for size in shape.split("x") if shape else ():
        wanted *= int(size)
    assert devices == wanted and kind in ("v5e", "v6e", "v5p", "h100")
    assert config.sequences % config.learner.micro_batch == 0
    assert config.rollout.batch_size <= config.sequences


def test_preset_with_a_target_takes_its_values(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(PRESET)
    assert load_config(f"{mine}") == Config(name="mine")
    both = load_config("qwen2_5_7b:v6e_4x4,dapo")
    assert (both.rl.clip_high, both.mesh.tensor) == (0.28, 4)
    for spelled in ("v6e_4x4", "v6e:4x4"):
        config = load_config(f"{mine}:{spelled}", seed=7)
        assert (config.mesh.fsdp, config.steps, config.seed) == (2, 3, 7)
    assert preset_targets(str(mine)) == ["v6e_4x4", "h100"]


@pytest.mark.parametrize("algorithm", load.ALGORITHMS)
@pytest.mark.parametrize("preset", preset_names())
def test_any_preset_takes_any_algorithm(preset: str, algorithm: str) -> None:
    plain = load_config(preset)
    if plain.prompts_per_step == 1 and load.ALGORITHMS[algorithm]["rl.minibatches"] > 1:
        with pytest.raises(ConfigError, match="prompts_per_step"):
            load_config(f"{preset}:{algorithm}")
        return
    config = load_config(f"{preset}:{algorithm}")
    for name, value in load.ALGORITHMS[algorithm].items():
        assert getattr(config.rl, name.removeprefix("rl.")) == value
    assert dataclasses.replace(config, rl=plain.rl) == plain


def test_algorithm_leaves_nothing_of_the_one_before_it() -> None:
    config = load_config("tiny")
    first = override(config, load.ALGORITHMS["dapo"] | {"rl.correction": "masked"})
    for name, values in load.ALGORITHMS.items():
        assert override(first, values).rl == override(config, values).rl, name


@pytest.mark.parametrize(("preset", "message"), [
    ("qwen2_5_7b:v4_2x2", "no target or algorithm 'v4_2x2': choose from its targets v6e_4x4, v5p_"),
    ("qwen2_5_7b:v6e_4x4,v5p_4x4x4", "'v5p_4x4x4' is another target: name one"),
    ("tiny:v6e_4x4", "no target or algorithm 'v6e_4x4': choose from its algorithms grpo, dr_grpo"),
    ("nope:v6e_4x4", "no preset 'nope'"),
])
def test_unknown_choice_is_refused_with_the_list(preset: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(preset)
    assert "\n" not in str(error.value)
