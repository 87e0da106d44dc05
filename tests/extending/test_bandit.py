"""The example of a controller runs in a trainer, and settles on what earns most."""

import dataclasses

import numpy as np
import pytest
from control_cases import LIMITS, record
from helpers import micro_config, micro_trainer

from specrl_jax.config import ControlConfig, SpecOptions
from tests.extending import bandit


def test_bandit_settles_on_the_fastest_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandit, "EPSILON", 0.0)
    controller = bandit.make(ControlConfig(), SpecOptions(), LIMITS)
    state, speed, chosen = controller.init(None), [5.0, 7.0, 9.0, 6.0, 1.0], []
    for _ in range(12):
        chosen.append(int(state.depth))
        state, _ = controller.end_chunk(state, record(1.0, committed=int(speed[chosen[-1]])))
    assert chosen[:5] == [0, 1, 2, 3, 4] and set(chosen[5:]) == {2}


@pytest.mark.slow
def test_trainer_steps_with_a_controller_by_its_path() -> None:
    config = micro_config(control=ControlConfig(policy="tests.extending.bandit:make"))
    config = dataclasses.replace(config, rollout=dataclasses.replace(
        config.rollout, rounds_per_launch=2))
    trainer = micro_trainer(config)
    rows = [trainer.step()[0] for _ in range(2)]
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert max(row.get("control/draft_depth", 0.0) for row in rows) > 0
