"""compare_runs.py on the algorithms behind a preset's colon: drafts change no token."""

import json
from pathlib import Path

import pytest

from experiments import compare_runs
from specrl_jax.config import load_config
from specrl_jax.config.rl import ALGORITHMS
from specrl_jax.training.run import train

IN_CI = ("gspo", "dapo", "remax")  # a ratio of sequences, a filter, greedy answers


@pytest.mark.ci
@pytest.mark.parametrize("name", [
    name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in ALGORITHMS])
def test_script_finds_equal_tokens_with_drafts_and_without(name: str, tmp_path: Path) -> None:
    """The actor as it began drafts for itself, and the second step's actor is another."""
    for policy in ("fixed", "off"):
        config = load_config(
            f"tiny:{name}", steps=2, prompts_per_step=4, group_size=2, rollout__batch_size=4,
            rollout__max_new_tokens=8, learner__micro_batch=8, learner__learning_rate=3e-3,
            reward__terms=("helpers:even",), spec__drafter="draft_model",
            draft__model="random:tiny",
            control__policy=policy, control__min_survival=0.0, track__to=())
        train(config, tmp_path / policy)
    out = tmp_path / "found.json"
    runs = [str(tmp_path / policy) for policy in ("fixed", "off")]
    assert compare_runs.main([*runs, f"--json={out}"]) == compare_runs.EQUAL
    actual = json.loads(out.read_text())
    assert (actual["steps"], actual["differences"], actual["rewards_failed_apart"]) == (2, [], {})
    drafted, plain = actual["accept_length"]
    assert drafted > 1.5 and plain == 1
