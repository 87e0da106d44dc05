"""Options that are set although another one's value ignores them."""

from typing import Any

import pytest

from specrl_jax.config import Config, RLConfig, load_config, preset_names
from specrl_jax.config.rl import ALGORITHMS
from specrl_jax.rl.algorithm import check_training


def lines(config: Config) -> list[str]:
    said: list[str] = []
    check_training(config, said.append)
    return said


@pytest.mark.parametrize("fields, line", [
    (dict(loss="reinforce", clip_low=0.1), "rl.clip_low = 0.1: is not read with rl.loss = 'reinf"
     "orce'; set rl.loss among ppo_clip, gspo, cispo"),
    (dict(filter_extra=5), "rl.filter_extra = 5: is not read with rl.filter = 'none'; set rl.filt"),
    (dict(kl_estimator="k2"), "rl.kl_estimator = 'k2': is not read with rl.kl = 0.0; set rl.kl"),
    (dict(teacher_weight=2.0), "rl.teacher_weight = 2.0: is not read with rl.teacher = ''; set"),
    (dict(loss="reinforce", updates=2), "rl.loss = 'reinforce': has no ratio, so that updates aft"),
    (dict(loss="gspo"), "rl.minibatches = 1: with one update on a rollout every ratio is 1, so"),
    (dict(clip_high=0.28), "rl.minibatches = 1: with one update on a rollout every ratio is 1, so"),
    (dict(loss="cispo", updates=0), ""), (dict(filter="dynamic", filter_extra=5), "")])
def test_option_without_effect_is_told(fields: dict[str, Any], line: str) -> None:
    actual = lines(Config(rl=RLConfig(**fields)))
    assert len(actual) == bool(line) and all(x.startswith(line) for x in actual)


@pytest.mark.parametrize("preset", preset_names())
def test_presets_set_nothing_that_is_not_read(preset: str) -> None:
    assert lines(load_config(preset)) == []
    if preset in ("tiny", "smollm2"):
        for algorithm in ALGORITHMS:
            assert lines(load_config(f"{preset}:{algorithm}")) == []
