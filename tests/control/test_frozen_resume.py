"""A resumed run with a frozen clock equals one that never stopped, whatever its controller."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import micro_config, micro_trainer_to_compile, run

from specrl_jax.config import (
    ControlConfig,
    DistillConfig,
    DraftConfig,
    LearnerConfig,
    RewardConfig,
    RolloutConfig,
    SpecOptions,
)
from specrl_jax.host.checkpoint import restore_part
from specrl_jax.host.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("programs_on_disk")

UNEQUAL = ("time/", "memory/", "compilations", "rollout/tokens_per_second")
ROLLOUT = RolloutConfig(batch_size=8, max_prompt_tokens=10, max_new_tokens=8, min_batch=8)
EAGLE = SpecOptions(drafter="eagle", steps=2, branch=1, nodes=3, max_steps=2, max_branch=1,
                    max_nodes=3)


def learns(when: str) -> dict[str, Any]:
    return {"spec": EAGLE, "draft": DraftConfig(vocab=256), "distill": DistillConfig(
        when=when, batch=8, micro_batch=8, updates=1, unroll=2, canary=4)}


@pytest.mark.slow
@pytest.mark.parametrize("policy, changes", [
    ("budget", {}), ("bandit", {}), ("budget", learns("every_step")),
    ("budget", learns("overlap"))], ids=("budget", "bandit", "every_step", "overlap"))
def test_a_resumed_run_chooses_what_it_would_have_chosen(
        policy: str, changes: dict[str, Any], tmp_path: Path) -> None:
    control = ControlConfig(policy=policy, clock="frozen", cost_table=str(tmp_path / "cost.json"))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for workdir, steps in ((whole, 4), (parts, 2), (parts, 4)):
        run(micro_trainer_to_compile(micro_config(
            steps=steps, control=control, checkpoint_every=2, rollout=ROLLOUT,
            reward=RewardConfig(terms=("helpers:even",)),
            learner=LearnerConfig(learning_rate=1e-2, micro_batch=16), **changes)), workdir)
    assert (whole / "samples.jsonl").read_bytes() == (parts / "samples.jsonl").read_bytes()
    told = [[{name: value for name, value in row.items() if not name.startswith(UNEQUAL)}
             for row in read_metrics(workdir)] for workdir in (whole, parts)]
    assert told[0] == told[1] and told[0][-1]["control/launches"]
    for row in read_metrics(parts):  # by the controller's table, after a resume as before
        took = sum(launch["seconds"] for launch in row["time/launches"])
        assert row["time/saved"] == pytest.approx(row["control/off_seconds"] - took, abs=1e-3)
    learned = ("drafter", "drafter_features") if changes else ()
    for key in ("actor", "control", "acceptance", *learned):
        arrays = [jax.tree.leaves(restore_part(w / "checkpoints", 4, key)) for w in (whole, parts)]
        assert len(arrays[0]) == len(arrays[1]) > 0
        for a, b in zip(*arrays, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=key)
