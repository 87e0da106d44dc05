"""A reader of a run that goes on and deletes old checkpoints gets an answer or one line."""

import re
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from specrl_jax.checkpoint import checkpoints as checkpoint
from specrl_jax.checkpoint.checkpoints import CheckpointError, Checkpoints, list_steps
from specrl_jax.config import ConfigError, load_config
from specrl_jax.model.source import open_actor
from specrl_jax.model.weights import describe_source
from specrl_jax.runtime.paths import CHECKPOINTS
from specrl_jax.sharding import make_mesh


@pytest.mark.ci
def test_newest_checkpoint_is_read_while_a_run_deletes_it(tmp_path: Path) -> None:
    """Each checkpoint's weights are its step, so that an answer's step and weights must agree."""
    config = load_config("tiny")
    params = describe_source(config.model.path).params()
    ended, failed = threading.Event(), []

    def run() -> None:
        try:
            with Checkpoints(tmp_path / CHECKPOINTS, 1) as checkpoints:
                for step in range(1, 10_000):
                    same = jax.tree.map(lambda a, s=step: np.full_like(a, s), params)
                    checkpoints.save(step, {"actor": same}, {})
                    if ended.wait(0.01):
                        return
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not list_steps(tmp_path / CHECKPOINTS):
            assert not failed
        steps = []
        while len(steps) < 20 or len(set(steps)) == 1:
            actor = open_actor(config, tmp_path)
            actual = jax.tree.leaves(actor.params(make_mesh(config.mesh)))
            assert {float(value) for leaf in actual for value in np.unique(leaf)} == {actor.step}
            steps.append(actor.step)
    finally:
        ended.set()
        thread.join()
    assert not failed and steps == sorted(steps)


@pytest.mark.parametrize("left", ["state", "nothing"])
def test_newest_checkpoint_that_vanishes_gives_way_to_a_newer_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    """The run deletes it between the choice of the newest step and the first look at its files."""
    config = load_config("tiny")
    params = describe_source(config.model.path).params()
    with Checkpoints(tmp_path / CHECKPOINTS, 1) as checkpoints:
        checkpoints.save(1, {"actor": params}, {})
        checkpoints.finish()
        actor = open_actor(config, tmp_path)
        checkpoints.save(2, {"actor": params}, {})
    old = tmp_path / CHECKPOINTS / "1"
    if left == "state":
        old.mkdir()
        shutil.copytree(tmp_path / CHECKPOINTS / "2" / "state", old / "state")
    actor.params(make_mesh(config.mesh))
    assert actor.step == 2


def two_checkpoints(folder: Path) -> None:
    with Checkpoints(folder, 2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"actor": {"a": np.ones(3)}}, {})


def test_newest_checkpoint_that_is_absent_or_damaged_is_named(tmp_path: Path) -> None:
    config = load_config("tiny")
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        open_actor(config, tmp_path)
    two_checkpoints(tmp_path / CHECKPOINTS)
    sums = tmp_path / CHECKPOINTS / "2" / "checksums.json"
    sums.write_text(re.sub(r", \d+\]", ", 0]", sums.read_text()))
    with pytest.raises(CheckpointError, match="2: damaged"):
        open_actor(config, tmp_path).params(make_mesh(config.mesh))


@pytest.mark.parametrize("vanishes, words", [(True, "1: was deleted"), (False, "loop is closed")])
def test_trouble_while_a_step_is_read_is_one_line(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vanishes: bool, words: str) -> None:
    two_checkpoints(tmp_path)
    monkeypatch.setattr(checkpoint, "DELETION", 0.0)

    def fail(*args: object) -> None:
        if vanishes:
            (tmp_path / "1" / "checksums.json").unlink()
        raise RuntimeError("Event loop is closed\nmore")

    monkeypatch.setattr(checkpoint, "_restore_part", fail)
    with pytest.raises(CheckpointError, match=words) as refused:
        checkpoint.restore_part(tmp_path, 1, "actor")
    assert "\n" not in str(refused.value)
