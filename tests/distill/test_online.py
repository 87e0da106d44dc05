"""Runs whose drafter learns: tokens and actor stay as they are, and runs resume exactly."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from distill_cases import INVARIANT, config
from helpers import micro_trainer_to_compile, moments, repeatable_metrics

from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import ConfigError, DistillConfig
from specrl_jax.distill.health import equal
from specrl_jax.distill.losses import LOSSES
from specrl_jax.metrics import run_files
from specrl_jax.metrics.progress import Progress
from specrl_jax.runtime import step_timer
from specrl_jax.runtime.compilation import CompilationCounter
from specrl_jax.training.run import Run, run_steps
from specrl_jax.training.saving import restore, to_save
from specrl_jax.training.state import TrainState
from specrl_jax.training.trainer import Trainer

MODES = {"every_step": {"when": "interval"},
         "every_2": {"when": "interval", "interval": 2, "rollouts": 2},
         "once": {"when": "once", "rollouts": 2}, "overlap": {"when": "interval", "overlap": True},
         "overlap_2": {"when": "interval", "overlap": True, "interval": 2},
         "verification": {"when": "verification"},
         "verification_overlap": {"when": "verification", "overlap": True},
         "trigger": {"when": "trigger", "threshold": 0.0}}
VERSIONS = {"every_step": [0, 1, 2, 3], "verification": [0, 1, 2, 3],
            "every_2": [0, 0, 1, 1], "once": [1, 1, 1, 1],
            "overlap": [0, 0, 1, 2], "overlap_2": [0, 0, 0, 1]}
HALF = dict(model__dtype="bfloat16", model__numerics="default")


class Finished(NamedTuple):
    """A run that ended, and its last state as the checkpoint has it."""

    trainer: Trainer
    state: TrainState
    workdir: Path
    warnings: list[str]

    @property
    def samples(self) -> list[Any]:
        return [{k: v for k, v in s.items() if k != "commits"}
                for s in run_files.read_samples(self.workdir)]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return run_files.read_metrics(self.workdir)

    @property
    def arrays(self) -> dict[str, Any]:
        saved = to_save(self.trainer, self.state).arrays
        return {name: a for name, a in saved.items() if name != "drafter_seconds"}

    @property
    def meta(self) -> dict[str, Any]:
        return to_save(self.trainer, self.state).meta


def run(config: Any, workdir: Path, change: Callable[[TrainState], TrainState] = lambda state: state
        ) -> Finished:
    """Runs or resumes, as run.train does; `change` makes the state that the run starts from."""
    warnings: list[str] = []
    arch = {} if config.model.dtype == "bfloat16" else INVARIANT
    trainer, initial = micro_trainer_to_compile(config, warn=warnings.append, **arch)
    with Checkpoints(workdir / "checkpoints", 9) as checkpoints:
        resumed = restore(trainer, initial, checkpoints)
        state, first = trainer.compile(resumed or change(initial))
        with (run_files.Writer(workdir, state.step) as writer,
              Progress(config.steps, state.step) as progress):
            list(run_steps(Run(trainer, None, checkpoints, writer, progress,
                               CompilationCounter()), state, first))
        last = restore(trainer, initial, checkpoints)
    assert last is not None and last.step == config.steps
    return Finished(trainer, last, workdir, warnings)


def resumed(config: Any, whole: Finished) -> Finished:
    """The run again, from its checkpoint of step 2 on."""
    parts = whole.workdir.with_name("parts")
    shutil.copytree(whole.workdir, parts)
    shutil.rmtree(parts / "checkpoints" / "4")
    return run(config, parts)


def instructions(compiled: Any) -> list[str]:
    """Of a program, without the lines of source that they come from."""
    return [re.sub(r", metadata={[^}]*}", "", line) for line in compiled.as_text().splitlines()
            if " = " in line]


def same(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, *(
        jax.tree.map(np.asarray, tree) for tree in (left, right)))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: Any) -> Finished:
    """A run whose drafter stands still."""
    return run(config("off"), tmp_path_factory.mktemp("off"))


@pytest.mark.ci
@pytest.mark.parametrize("mode", [
    mode if mode == "every_step" else pytest.param(mode, marks=pytest.mark.full) for mode in MODES])
def test_run_of_every_mode_keeps_the_actor_and_resumes_exactly(
        mode: str, frozen: Finished, tmp_path: Path) -> None:
    whole = run(config(**MODES[mode]), tmp_path / "whole")
    rows = whole.metrics
    assert whole.samples == frozen.samples and not whole.warnings
    same(whole.state.learner, frozen.state.learner)
    updates = [one.trainer.policy._programs["update"] for one in (whole, frozen)]
    assert instructions(updates[0]) == instructions(updates[1])
    assert [row["compilations"] for row in rows] == [0] * 4
    for name in ("loss", "checksum/policy"):
        assert [row[name] for row in rows] == [row[name] for row in frozen.metrics]
    assert len({row["checksum/policy"] for row in rows}) == 4
    drafted = {row["version/drafter"]: row["checksum/drafter"] for row in rows}
    assert [drafted[row["version/drafter"]] for row in rows] == [
        row["checksum/drafter"] for row in rows] and len({*drafted.values()}) == len(drafted)
    assert [row["version/drafter"] for row in rows] == VERSIONS.get(
        mode, [row["version/drafter"] for row in rows])
    check_accounts(whole)
    heads = [one.state.drafter.published.weights[0]["weights"] for one in (whole, frozen)]
    assert not equal(*heads)
    parts = resumed(config(**MODES[mode]), whole)
    assert parts.samples == frozen.samples and parts.meta == whole.meta
    assert repeatable_metrics(whole.workdir) == repeatable_metrics(parts.workdir)
    same(whole.arrays, parts.arrays)


@pytest.mark.ci
@pytest.mark.parametrize("mode", [
    mode if mode == "every_2" else pytest.param(mode, marks=pytest.mark.full) for mode in VERSIONS])
def test_run_in_bfloat16_learns_and_resumes_exactly(mode: str, tmp_path: Path) -> None:
    options = config(**MODES[mode], **HALF)
    whole = run(options, tmp_path / "whole")
    assert [row["compilations"] for row in whole.metrics] == [0] * 4 and not whole.warnings
    features = whole.arrays["drafter_features"]
    assert {features[name].dtype.name for name in ("taps", "hidden", "heads")} == {"bfloat16"}
    check_accounts(whole)
    parts = resumed(options, whole)
    assert parts.samples == whole.samples
    same(whole.arrays, parts.arrays)


@pytest.mark.full
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != DistillConfig().loss])
def test_run_with_every_loss_keeps_the_actor(loss: str, frozen: Finished, tmp_path: Path) -> None:
    whole = run(config("interval", loss=loss), tmp_path)
    assert whole.samples == frozen.samples
    same(whole.state.learner, frozen.state.learner)
    assert [row["distill/updates"] for row in whole.metrics] == [2] * 4


@pytest.mark.ci
@pytest.mark.parametrize("when, options", [("off", {}), ("trigger", {"threshold": 1e9})])
def test_frozen_drafter_resumes_with_its_faults_and_staleness(
        when: str, options: Any, frozen: Finished, tmp_path: Path) -> None:
    """A trigger that never fires has watched acceptance fall or rise until the checkpoint."""
    whole = run(config(when, **options), tmp_path / "whole", lambda state: state.replace(
        drafter=state.drafter.replace(faults=3, seconds=np.array([5.0, 2.0]))))
    parts = resumed(config(when, **options), whole)
    assert parts.samples == whole.samples == frozen.samples and parts.meta == whole.meta
    drafter = parts.state.drafter
    assert drafter.faults == 3 and drafter.seconds[0] > 5
    if when == "trigger":
        same(drafter.online.staleness, whole.state.drafter.online.staleness)
        assert drafter.online.staleness.fall != 0


@pytest.mark.ci
@pytest.mark.parametrize("when", [
    "interval", pytest.param("verification", marks=pytest.mark.full)])
def test_drafter_learns_on_a_mesh_and_goes_on_without_it(when: str, tmp_path: Path) -> None:
    mesh = {"mesh__data": 2, "mesh__fsdp": 2}
    still, learning = (run(config(mode, **mesh), tmp_path / mode) for mode in ("off", when))
    assert still.samples == learning.samples
    same(still.state.learner, learning.state.learner)
    good = learning.state.drafter.good
    assert good.number == 4 and not learning.warnings
    head, moment = good.learner.params["head"], moments(good.learner.optimizer)["head"]
    assert [shard.data.shape[1] * n for shard, n in (
        (head.addressable_shards[0], 2), (moment.addressable_shards[0], 4))] == [head.shape[1]] * 2
    alone = resumed(config(when), learning)
    assert alone.samples == still.samples
    weights = [jax.tree.leaves(one.state.drafter.published.weights) for one in (alone, learning)]
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)  # sums over rows have another order


def check_accounts(run: Finished) -> None:
    """Every step has seconds spent, saved and their difference; the features are in budget."""
    rows = run.metrics
    spent, saved = (np.cumsum([row[name] for row in rows])
                    for name in ("time/distill", "time/saved"))
    net = [row["time/speculation_net"] for row in rows]
    np.testing.assert_allclose(net, saved - spent, atol=1e-9)
    trained = [row for row in rows if row["distill/updates"]]
    assert trained and all(row["distill/updates"] == 2 for row in trained)
    assert all(row["time/distill_updates"] > 0 for row in trained)
    budget = run.trainer.config.distill.megabytes * 2**20
    assert all(0 < row["distill/buffer_bytes"] <= budget for row in rows)


@pytest.mark.ci
def test_step_charges_the_drafter_for_all_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still but for launches and the calls of the drafter's lifecycle."""
    trainer, state = micro_trainer_to_compile(config("interval", probe_tokens=0), **INVARIANT)
    state, _ = trainer.compile(state)
    clock = [0.0]

    def timed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            clock[0] += seconds
            return call(*args, **options)

        return run

    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for name, seconds in (("before_rollout", 1), ("collect", 3), ("after_update", 5)):
        monkeypatch.setattr(trainer.drafter, name, timed(getattr(trainer.drafter, name), seconds))
    engine = trainer.sampler.engine
    monkeypatch.setattr(engine, "launch", timed(engine.launch, 2))
    for step in range(2):
        state, row, _ = trainer.step(state)
        assert (row["time/distill"], row["time/learn"]) == (9, 0) and row["time/rollout"] > 0
        assert row["time/step"] == 9 + row["time/rollout"]
        assert state.drafter.seconds[0] == 9 * (step + 1)


@pytest.mark.ci
def test_training_before_rl_leaves_the_state_that_it_began_with() -> None:
    """A reward that fails in the first step leaves it to the caller, who may begin again."""
    trainer, state = micro_trainer_to_compile(config(**MODES["once"]), **INVARIANT)
    state, _ = trainer.compile(state)
    trained = [trainer.drafter.before_rollout(
        state.drafter, state.policy, state.speculation, 0,
        lambda number: trainer.sample(state, number))[0] for _ in range(2)]
    same(trained[0].good.learner, trained[1].good.learner)
    assert [one.good.number for one in (state.drafter, *trained)] == [0, 1, 1]
    assert not equal(state.drafter.good.learner, trained[0].good.learner)


@pytest.mark.parametrize("changes, message", [
    (dict(spec__drafter="history"), "distill.when = 'once': spec.drafter = 'history' .* has "
     "nothing that learns; choose eagle"),
    (dict(batch=64), "distill.batch = 64: 1 x 16 sequences are"),
    (dict(when="interval", overlap=True, mesh__data=2),
     "distill.overlap = True: two programs at once over 2 devices"),
    (dict(batch=9, micro_batch=9, mesh__data=2),
     "distill.micro_batch = 9: must be a multiple of the 2 data shards"),
    (dict(megabytes=1, batch=2048, rollouts=200),
     "distill.megabytes = 1: an update of 2048 sequences and 1 heads take"),
    (dict(when="trigger", spec__drafter="bigram:bigram"),
     "distill.when = 'trigger': needs a trainable drafter with outputs and logits"),
])
def test_trainer_refuses_options_that_cannot_work(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        micro_trainer_to_compile(config(**{"when": "once"} | changes), **INVARIANT)
