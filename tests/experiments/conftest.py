"""A trained tiny run, made once, and scripts as a user starts them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import ROOT, script_environment, with_fields

from specrl_jax.config import Config
from specrl_jax.training.run import train


@pytest.fixture(scope="session")
def small() -> Config:
    """The smallest run in which weights change: no checkpoint before its end."""
    return with_fields(
        Config(), name="small", steps=2, prompts_per_step=2, group_size=2, checkpoint_every=2,
        model__path="random:tiny", data__examples=4, reward__terms=("helpers:even",),
        rollout__batch_size=4, rollout__max_prompt_tokens=96, rollout__max_new_tokens=8,
        learner__learning_rate=1e-2, learner__micro_batch=4)


@pytest.fixture(scope="session")
def trained(small: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a complete run of `small`."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    train(small, workdir)
    return workdir


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess]:
    """Runs a script of experiments/."""
    def call(script: str, *arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, ROOT / "experiments" / script, *map(str, arguments)], text=True,
            capture_output=True, timeout=300, env=script_environment())

    return call
