"""A drafter that learns in a run: tokens and actor stay, runs resume exactly, faults are found."""

import copy
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import counting, micro_config, micro_trainer_to_compile, moments, repeatable_metrics
from specrl_jax.distill.drafter import DrafterManager, FrozenDrafter

from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import ConfigError, DistillConfig
from specrl_jax.distill import drafter as drafters
from specrl_jax.distill.health import Probe, equal, fault_of, summarize
from specrl_jax.distill.losses import LOSSES
from specrl_jax.draft.off import off
from specrl_jax.draft.registry import DrafterPart, DrafterSet
from specrl_jax.metrics import run_files
from specrl_jax.metrics.progress import Progress
from specrl_jax.runtime import step_timer
from specrl_jax.runtime.checksum import checksum
from specrl_jax.runtime.compilation import CompilationCounter
from specrl_jax.training.run import run_steps
from specrl_jax.training.trainer import Trainer

LEARN = dict(batch=8, micro_batch=8, updates=2, unroll=2, learning_rate=3e-3, probe_tokens=4)
MODES = {"every_step": {"when": "interval"},
         "every_2": {"when": "interval", "interval": 2, "rollouts": 2},
         "once": {"when": "once", "rollouts": 2}, "overlap": {"when": "interval", "overlap": True},
         "overlap_2": {"when": "interval", "overlap": True, "interval": 2},
         "trigger": {"when": "trigger", "threshold": 0.0}}
INVARIANT = dict(num_heads=4, num_kv_heads=2, head_dim=16)  # heads that machine code can take


def config(when: str, **fields: Any) -> Any:
    """`fields` are those of `distill`, or of others as mesh__data."""
    own = {name if "__" in name else f"distill__{name}": value
           for name, value in (LEARN | fields).items()}
    return micro_config(**dict(
        steps=4, checkpoint_every=2, spec__drafter="eagle", draft__vocab=256, distill__when=when,
        control__min_survival=0.0, model__numerics="invariant", reward__terms=("helpers:even",),
        learner__learning_rate=1e-2, learner__max_grad_norm=1.0) | own)


def run(trainer: Trainer, workdir: Path) -> None:
    """Runs or resumes, as run.train does."""
    with Checkpoints(workdir / "checkpoints", 9) as checkpoints:
        trainer.restore(checkpoints)
        trainer.compile(lambda text: None)
        counter = CompilationCounter()
        with (run_files.Writer(workdir, trainer.step_number) as writer,
              Progress(trainer.config.steps, trainer.step_number) as progress):
            list(run_steps(trainer, checkpoints, writer, progress, counter, {}))


def samples(workdir: Path) -> list[Any]:
    return [{k: v for k, v in s.items() if k != "commits"} for s in run_files.read_samples(workdir)]


def instructions(compiled: Any) -> list[str]:
    """Of a program, without the places in the source that they come from."""
    return [re.sub(r", metadata={[^}]*}", "", line) for line in compiled.as_text().splitlines()
            if " = " in line]


def same(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, *(
        jax.tree.map(np.asarray, tree) for tree in (left, right)))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: Any) -> tuple[Trainer, Path]:
    """A run whose drafter stands still."""
    workdir = tmp_path_factory.mktemp("off")
    trainer = micro_trainer_to_compile(config("off"), **INVARIANT)
    run(trainer, workdir)
    return trainer, workdir


@pytest.mark.ci
@pytest.mark.parametrize("mode", [
    mode if mode == "every_step" else pytest.param(mode, marks=pytest.mark.full) for mode in MODES])
def test_run_of_every_mode_keeps_the_actor_and_resumes_exactly(
        mode: str, frozen: Any, tmp_path: Path) -> None:
    still, plain = frozen
    whole = micro_trainer_to_compile(config(**MODES[mode]), **INVARIANT)
    run(whole, tmp_path / "whole")
    assert samples(tmp_path / "whole") == samples(plain)
    same(whole.state, still.state)
    updates = [run._programs["update"] for run in (whole, still)]
    assert instructions(updates[0]) == instructions(updates[1])
    told = run_files.read_metrics(tmp_path / "whole")
    assert [row["compilations"] for row in told] == [0] * 4 and not whole.warnings
    for name in ("loss", "checksum/policy"):
        assert [row[name] for row in told] == [row[name] for row in run_files.read_metrics(plain)]
    assert len({row["checksum/policy"] for row in told}) == 4
    drafted = {row["version/drafter"]: row["checksum/drafter"] for row in told}
    assert [drafted[row["version/drafter"]] for row in told] == [
        row["checksum/drafter"] for row in told] and len({*drafted.values()}) == len(drafted)
    versions = {"every_step": [0, 1, 2, 3], "every_2": [0, 0, 1, 1], "once": [1, 1, 1, 1],
                "overlap": [0, 0, 1, 2], "overlap_2": [0, 0, 0, 1]}
    if mode in versions:
        assert [row["version/drafter"] for row in told] == versions[mode]
    assert any(row["distill/updates"] == 2 for row in told)
    accounted(told, whole.config.distill.megabytes)
    assert not equal(whole.drafter.state.params, weights(still))

    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "4")
    parts = micro_trainer_to_compile(config(**MODES[mode]), **INVARIANT)
    run(parts, tmp_path / "parts")
    assert samples(tmp_path / "parts") == samples(plain)
    assert repeatable_metrics(tmp_path / "whole") == repeatable_metrics(tmp_path / "parts")
    kept = [{k: v for k, v in t.arrays().items() if k != "drafter_seconds"} for t in (whole, parts)]
    same(*kept)
    assert whole.meta() == parts.meta()


@pytest.mark.ci
@pytest.mark.parametrize("mode", [
    mode if mode == "every_2" else pytest.param(mode, marks=pytest.mark.full) for mode in MODES
    if mode != "trigger"])  # whether it fires is chance
def test_run_in_bfloat16_learns_and_resumes_exactly(mode: str, tmp_path: Path) -> None:
    half = dict(model__dtype="bfloat16", model__numerics="default")
    whole = micro_trainer_to_compile(config(**MODES[mode], **half))
    run(whole, tmp_path / "whole")
    told = run_files.read_metrics(tmp_path / "whole")
    assert any(row["distill/updates"] == 2 for row in told)
    assert [row["compilations"] for row in told] == [0] * 4 and not whole.warnings
    features = whole.drafter.training.buffer.arrays()
    assert {features[name].dtype.name for name in ("taps", "hidden", "heads")} == {"bfloat16"}
    accounted(told, whole.config.distill.megabytes)

    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "4")
    parts = micro_trainer_to_compile(config(**MODES[mode], **half))
    run(parts, tmp_path / "parts")
    assert samples(tmp_path / "parts") == samples(tmp_path / "whole")
    same(*({k: v for k, v in t.arrays().items() if k != "drafter_seconds"}
           for t in (whole, parts)))


@pytest.mark.full
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != DistillConfig().loss])
def test_run_with_every_loss_keeps_the_actor(loss: str, frozen: Any, tmp_path: Path) -> None:
    still, plain = frozen
    whole = micro_trainer_to_compile(config("interval", loss=loss), **INVARIANT)
    run(whole, tmp_path)
    assert samples(tmp_path) == samples(plain)
    same(whole.state, still.state)
    assert [row["distill/updates"] for row in run_files.read_metrics(tmp_path)] == [2] * 4


@pytest.mark.ci
@pytest.mark.parametrize("when, options", [("off", {}), ("trigger", {"threshold": 1e9})])
def test_frozen_drafter_resumes_with_its_faults_and_staleness(
        when: str, options: Any, frozen: Any, tmp_path: Path) -> None:
    """A trigger that never fires has watched acceptance fall or rise until the checkpoint."""
    whole = micro_trainer_to_compile(config(when, **options), **INVARIANT)
    whole.drafter.faults, whole.drafter.seconds = 3, np.array([5.0, 2.0])
    run(whole, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "4")
    parts = micro_trainer_to_compile(config(when, **options), **INVARIANT)
    run(parts, tmp_path / "parts")
    assert samples(tmp_path / "parts") == samples(tmp_path / "whole") == samples(frozen[1])
    assert whole.meta() == parts.meta() and parts.drafter.faults == 3
    assert parts.drafter.seconds[0] > 5
    if when == "trigger":
        same(whole.drafter.training.staleness, parts.drafter.training.staleness)
        assert whole.drafter.training.staleness.fall != 0


@pytest.mark.ci
def test_drafter_learns_on_a_mesh_and_goes_on_without_it(tmp_path: Path) -> None:
    mesh, both = {"mesh__data": 2, "mesh__fsdp": 2}, []
    for when in ("off", "interval"):
        trainer = micro_trainer_to_compile(config(when, **mesh), **INVARIANT)
        run(trainer, tmp_path / when)
        both.append(trainer)
    still, learning = both
    assert samples(tmp_path / "off") == samples(tmp_path / "interval")
    same(still.state, learning.state)
    assert learning.drafter.good.version == 4 and not learning.warnings
    for state in (learning.drafter.state, learning.drafter.good.state):
        head, moment = state.params["head"], moments(state.optimizer)["head"]
        assert [shard.data.shape[1] * n for shard, n in (
            (head.addressable_shards[0], 2), (moment.addressable_shards[0], 4))] == [
                head.shape[1]] * 2
    shutil.copytree(tmp_path / "interval", tmp_path / "alone")
    shutil.rmtree(tmp_path / "alone" / "checkpoints" / "4")
    alone = micro_trainer_to_compile(config("interval"), **INVARIANT)
    run(alone, tmp_path / "alone")
    assert samples(tmp_path / "alone") == samples(tmp_path / "off")
    for a, b in zip(*(jax.tree.leaves(weights(t)) for t in (alone, learning)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)  # sums over rows have another order


def accounted(rows: list[dict[str, Any]], megabytes: int) -> None:
    """Every step tells seconds spent, saved and their difference; the buffer is in budget."""
    spent, saved = (np.cumsum([row[name] for row in rows])
                    for name in ("time/distill", "time/saved"))
    net = [row["time/speculation_net"] for row in rows]
    np.testing.assert_allclose(net, saved - spent, atol=1e-9)
    assert all(row["time/distill_updates"] > 0 for row in rows if row["distill/updates"])
    assert all(0 < row["distill/buffer_bytes"] <= megabytes * 2**20 for row in rows)


class Clocked:
    """A manager of drafters whose calls take seconds of a clock, as all parts of a step do."""

    def __init__(self, clock: list[float], manager: Any, *seconds: float) -> None:
        self.account, names = manager.account, ("before_rollout", "collect", "after_update")
        for name, cost in zip(names, seconds, strict=True):
            setattr(self, name, takes(clock, cost, {}))


def takes(clock: list[float], seconds: float, result: Any) -> Any:
    """A function that moves the clock."""

    def part(*arguments: Any) -> Any:
        clock[0] += seconds
        return copy.deepcopy(result)

    return part


@pytest.mark.parametrize("drafts", [False, True])
def test_step_charges_the_drafter_for_all_its_seconds(
        drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rollout's 10 s, 4 were saved."""
    clock = [0.0]
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    manager = object.__new__(FrozenDrafter) if drafts else DrafterManager()
    manager.seconds = np.zeros(2)

    def gather(progress: Any, timer: step_timer.StepTimer) -> tuple[Any, ...]:
        for phase, seconds in (("rollout", 10), ("reward", 20)):
            with timer(phase):
                clock[0] += seconds
        return None, np.ones(4), np.ones(4), [], {"time/saved": 4.0}

    trainer = SimpleNamespace(
        _gather=gather, learn=takes(clock, 30, {}), drafter=Clocked(clock, manager, 1, 3, 5),
        config=SimpleNamespace(rl=SimpleNamespace(overlong="keep")), step_number=0,
        _programs={"compute_logprobs": None},
        sampler=SimpleNamespace(checksum=7, engine=SimpleNamespace(control=0, acceptance=0)))
    rows = [Trainer.step(trainer)[0] for _ in range(2)]
    spent = 1 + 3 + 5
    assert [row.get("time/distill") for row in rows] == [spent if drafts else None] * 2
    assert [row.get("time/speculation_net") for row in rows] == (
        [4 - spent, 8 - 2 * spent] if drafts else [None] * 2)
    assert [(row["time/reward"], row["time/learn"], row["time/step"]) for row in rows] == [
        (20, 30, 60 + spent)] * 2


# Faults, injected where rollouts read the drafter, or into the learner.


@pytest.fixture(scope="module")
def learning() -> Trainer:
    """A trainer whose drafter has learned enough for a probe to see that it no longer does."""
    trainer = micro_trainer_to_compile(config(
        "interval", updates=8, learning_rate=4e-3, batch=16, probe_tokens=8), **INVARIANT)
    trainer.compile(lambda text: None)
    for _ in range(12):
        trainer.step()
    assert trainer.drafter.good.version == 12 and not trainer.warnings
    return trainer


def weights(trainer: Trainer) -> Any:
    return trainer.sampler.drafter_weights[0]["weights"]


def put(trainer: Trainer, tree: Any) -> Any:
    return trainer.sampler.engine.replicate(tree)


def published(trainer: Trainer, **head: Any) -> None:
    """Rollouts draft with something that nobody published."""
    sampler = trainer.sampler
    spoiled = put(trainer, sampler.drafter_weights[0] | head)
    sampler.publish_drafter((spoiled,), sampler.drafter_version)


def shuffled(tree: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.permutation(np.asarray(a).reshape(-1)).reshape(a.shape), tree)


def rebound(sampler: Any) -> None:
    """The weights are well, but not what rollouts read."""
    bound = sampler.drafter_params
    sampler.drafter_params = bound.replace(embed=bound.embed + 1)


def other_map(trainer: Trainer) -> Any:
    vocab = np.asarray(trainer.sampler.drafter_weights[0]["vocab"])
    return np.sort((vocab + 7) % 512).astype(np.int32)


PUT = {"not finite": lambda t: published(t, weights=jax.tree.map(lambda a: a * np.nan, weights(t))),
       "zeroed": lambda t: published(t, weights=jax.tree.map(lambda a: a * 0, weights(t))),
       "shuffled": lambda t: published(t, weights=shuffled(weights(t))),
       "swapped": lambda t: published(t, weights=jax.tree.map(lambda a: a + 1, weights(t))),
       "vocabulary map": lambda t: published(t, vocab=other_map(t)),
       "bound parameters": lambda t: rebound(t.sampler)}


def step(trainer: Trainer) -> tuple[dict[str, Any], list[Any]]:
    record, said = trainer.step()
    return record, [s["tokens"] for s in said]


def named(injected: str) -> str:
    """What `drafter/fault` calls an injected fault."""
    return injected if injected in ("not finite", "zeroed", "dead") else "not as published"


def without_updates(trainer: Trainer, patched: pytest.MonkeyPatch) -> None:
    """Steps leave actor and drafter as they are; faults are found all the same."""
    for name in ("collect", "after_update"):
        patched.setattr(trainer.drafter, name, lambda *arguments: {})
    patched.setattr(trainer, "learn", lambda *rollout: {"applied": 1.0})


@pytest.mark.ci
@pytest.mark.parametrize("fault", [*PUT, "stale", "skipped publish"])
def test_drafter_that_nobody_published_is_found_before_it_drafts(
        fault: str, learning: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last good version drafts at once, with the tokens of a run that had no fault."""
    trainer, sampler = learning, learning.sampler
    earlier = sampler.drafter_weights
    if fault not in PUT:
        step(trainer)  # which publishes the next version
    number = trainer.step_number
    with monkeypatch.context() as patched:
        without_updates(trainer, patched)
        well, tokens = step(trainer)
        trainer.step_number, before = number, trainer.drafter.faults
        good, version = sampler.drafter_weights, trainer.drafter.good.version
        if fault in PUT:
            PUT[fault](trainer)
        else:
            sampler.publish_drafter(earlier, version - (fault == "skipped publish"))
        ill, repeated = step(trainer)
        trainer.step_number = number
    assert ill["drafter/fault"] == named(fault) and named(fault) in trainer.warnings.pop()
    assert repeated == tokens
    assert ill["rollout/accept_length"] == well["rollout/accept_length"] > 1.1
    assert (ill["drafter/faults"], ill["drafter/disabled"]) == (before + 1, 0)
    assert sampler.drafter_weights is good and sampler.drafter_version == version
    assert "drafter/fault" not in trainer.drafter.before_rollout(number)


@pytest.mark.ci
@pytest.mark.parametrize("fault", PUT)
def test_faulty_drafter_that_is_not_verified_changes_no_token(
        fault: str, learning: Trainer) -> None:
    expected, good = undrafted(learning), learning.sampler.drafter_weights
    with pytest.MonkeyPatch.context() as patched:
        without_updates(learning, patched)
        patched.setattr(learning.drafter, "before_rollout", lambda step: {})
        PUT[fault](learning)
        record, tokens = step(learning)
    learning.step_number -= 1
    learning.sampler.publish_drafter(good, learning.drafter.good.version)
    learning.sampler.broken = False
    learning.sampler.draft_to(None)
    learning.warnings.clear()
    assert tokens == expected
    assert (record["rollout/drafted"] > 0) == (fault != "not finite")


@pytest.mark.ci
def test_bound_parameters_that_were_changed_are_published_again(learning: Trainer) -> None:
    """The weights are well, but not what rollouts read."""
    expected, sampler = undrafted(learning), learning.sampler
    bound = sampler.drafter_params
    sampler.drafter_params = bound.replace(embed=bound.embed + 1)
    record, tokens = step(learning)
    assert record["drafter/fault"] == "not as published" and tokens == expected
    learning.warnings.clear()


def merged_with_a_small_model() -> Any:
    return config("interval", probe_tokens=8, spec__drafter="merge", spec__max_nodes=6,
                  spec__nodes=6, draft__parts=("eagle", "draft_model"), draft__model="random:tiny")


@pytest.mark.ci
@pytest.mark.parametrize("learns", [True, False], ids=["head", "small model"])
def test_every_part_of_merged_drafters_is_verified(learns: bool) -> None:
    trainer = micro_trainer_to_compile(merged_with_a_small_model(), **INVARIANT)
    trainer.compile(lambda text: None)
    step(trainer), step(trainer)
    assert trainer.drafter.good.version == 2 and not trainer.warnings
    sampler = trainer.sampler
    part = sampler.drafters.trainable if learns else 1 - sampler.drafters.trainable
    for fault, spoiled in (("zeroed", SPOILED["zeroed"]), ("shuffled", shuffled)):
        expected, version = undrafted(trainer), trainer.drafter.good.version
        changed = list(sampler.drafter_weights)
        changed[part] = put(trainer, changed[part] | {
            "weights": spoiled(changed[part]["weights"])} if learns else spoiled(changed[part]))
        sampler.publish_drafter(changed, version)
        record, tokens = step(trainer)
        assert record["drafter/fault"] == named(fault) and named(fault) in trainer.warnings.pop()
        assert tokens == expected and trainer.drafter.good.version == version + 1
        assert not trainer.drafter.disabled
        assert "drafter/fault" not in trainer.drafter.before_rollout(9) and not trainer.warnings


@pytest.mark.ci
def test_small_model_that_is_zero_at_the_start_never_drafts() -> None:
    """No new version of the head merged with it is a reason to."""
    trainer = micro_trainer_to_compile(merged_with_a_small_model(), **INVARIANT)
    sampler = trainer.sampler
    small, changed = 1 - sampler.drafters.trainable, list(sampler.drafter_weights)
    changed[small] = put(trainer, SPOILED["zeroed"](changed[small]))
    sampler.publish_drafter(changed, 0)
    trainer.compile(lambda text: None)
    assert "zeroed; nothing is drafted" in trainer.warnings.pop()
    told = [step(trainer)[0] for _ in range(2)]
    assert trainer.drafter.good.version == 2 and not trainer.warnings  # the head learned
    assert [(row["drafter/disabled"], row["rollout/drafted"]) for row in told] == [(1, 0)] * 2


@pytest.mark.ci
def test_head_that_is_zero_at_the_start_is_named(frozen: Any) -> None:
    trainer = micro_trainer_to_compile(config("off"), **INVARIANT)
    published(trainer, weights=SPOILED["zeroed"](weights(trainer)))
    trainer.compile(lambda text: None)
    assert "zeroed; nothing is drafted" in trainer.warnings.pop()
    record, tokens = step(trainer)
    assert record["drafter/disabled"] == 1 and record["rollout/drafted"] == 0
    assert "drafter/fault" not in record
    assert tokens == [s["tokens"] for s in run_files.read_samples(frozen[1]) if s["step"] == 0]


@pytest.mark.ci
def test_small_model_alone_is_verified() -> None:
    """It learns nothing, so one version drafts, whose checksum every rollout records."""
    trainer = micro_trainer_to_compile(config("off", probe_tokens=8, spec__drafter="draft_model",
                                              draft__model="random:tiny"), **INVARIANT)
    trainer.compile(lambda text: None)
    sampler, good = trainer.sampler, trainer.sampler.drafter_weights
    told = [step(trainer)[0]]
    spoilers = SPOILED | {"swapped": lambda tree: jax.tree.map(lambda a: a + 1, tree)}
    for fault, spoiled in spoilers.items():
        expected = undrafted(trainer)
        sampler.publish_drafter(put(trainer, spoiled(good)), 0)
        record, tokens = step(trainer)
        told.append(record)
        found = named("shuffled" if fault == "dead" else fault)
        assert record["drafter/fault"] == found and found in trainer.warnings.pop()
        assert tokens == expected and sampler.drafter_weights is good
        assert record["drafter/disabled"] == 0
    assert [row["version/drafter"] for row in told] == [0] * 5
    assert {row["checksum/drafter"] for row in told} == {checksum(good)}
    assert [row["drafter/faults"] for row in told] == [0, 1, 2, 3, 4]


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["not finite", "zeroed", "shuffled"])
def test_learner_that_was_damaged_returns_to_the_good_version(
        fault: str, learning: Trainer) -> None:
    manager, version = learning.drafter, learning.drafter.good.version
    spoiled = (SPOILED | {"shuffled": shuffled})[fault](manager.state.params)
    manager.state = manager.state.replace(params=put(learning, spoiled))
    expected = undrafted(learning)
    record, tokens = step(learning)
    assert record["drafter/fault"] == named(fault) and named(fault) in learning.warnings.pop()
    assert tokens == expected
    assert manager.good.version == version + 1  # one training on, from the version before
    assert step(learning)[0]["rollout/accept_length"] > 1.1


SPOILED = {"not finite": lambda tree: jax.tree.map(lambda a: a * np.nan, tree),
           "zeroed": lambda tree: jax.tree.map(lambda a: a * 0, tree),
           "dead": lambda tree: shuffled(tree)}


def spoil(trainer: Trainer, fault: str, patched: pytest.MonkeyPatch) -> None:
    """Each training of the learner ends so."""
    training = trainer.drafter.training
    train_on = training.train_on

    def spoiling(*batch: Any) -> Any:
        result = train_on(*batch)
        params = put(trainer, SPOILED[fault](result.state.params))
        return result._replace(state=result.state.replace(params=params))

    patched.setattr(training, "train_on", spoiling)


def undrafted(trainer: Trainer) -> list[Any]:
    """The tokens of the next step, which is not taken."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "drafter", DrafterManager())
        patched.setattr(trainer, "learn", lambda *rollout: {"applied": 1.0})
        trainer.sampler.draft_to(0)
        record, tokens = step(trainer)
    trainer.sampler.draft_to(None)
    trainer.step_number -= 1
    assert record["rollout/drafted"] == 0
    return tokens


@pytest.mark.ci
@pytest.mark.parametrize("fault", SPOILED)
def test_update_that_spoils_the_drafter_is_not_published(fault: str, learning: Trainer) -> None:
    """The trigger keeps its reference, too: what drafts on is as stale as it was."""
    manager, training = learning.drafter, learning.drafter.training
    good = manager.good
    training.staleness = training.staleness.replace(fall=np.asarray(-0.5))
    with pytest.MonkeyPatch.context() as patched:
        spoil(learning, fault, patched)
        record, _ = step(learning)
    assert record["drafter/fault"] == fault and fault in learning.warnings.pop()
    assert manager.good is good and learning.sampler.drafter_weights is good.weights
    assert training.staleness.fall == -0.5
    expected = undrafted(learning)
    record, tokens = step(learning)
    assert tokens == expected and record["rollout/accept_length"] > 1.1
    assert "drafter/fault" not in record and manager.good.version == good.version + 1
    assert training.staleness.fall == 0


@pytest.mark.ci
def test_learner_without_a_finite_update_is_named(learning: Trainer) -> None:
    good, batches = learning.drafter.good, learning.drafter.training.put
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learning.drafter.training, "put", lambda batch: jax.tree.map(
            lambda a: a * np.nan if jnp.issubdtype(a.dtype, jnp.floating) else a, batches(batch)))
        record, _ = step(learning)
    assert record["drafter/fault"] == "not finite" and record["distill/applied"] == 0
    assert "not finite" in learning.warnings.pop()
    assert learning.drafter.good is good and learning.sampler.drafter_weights is good.weights
    record, _ = step(learning)
    assert "drafter/fault" not in record and learning.drafter.good.version == good.version + 1


@pytest.mark.ci
def test_overlapped_update_that_spoils_it_is_not_published() -> None:
    trainer = micro_trainer_to_compile(config("interval", overlap=True, probe_tokens=8),
                                       **INVARIANT)
    trainer.compile(lambda text: None)
    step(trainer), step(trainer)
    manager, training = trainer.drafter, trainer.drafter.training
    training.meta()  # waits: these updates are well
    version, learn, running = manager.good.version, trainer.learn, []

    def watched(*rollout: Any) -> dict[str, Any]:
        running.append(training._running is not None)
        return learn(*rollout)

    trainer.learn = watched
    with pytest.MonkeyPatch.context() as patched:
        spoil(trainer, "not finite", patched)
        record, _ = step(trainer)  # publishes what the step before learned
        training.meta()
    assert "drafter/fault" not in record and manager.good.version == version + 1
    expected = undrafted(trainer)
    record, tokens = step(trainer)
    assert record["drafter/fault"] == "not finite" and manager.good.version == version + 1
    assert tokens == expected and "not finite" in trainer.warnings.pop()
    step(trainer)
    assert manager.good.version == version + 2 and not trainer.warnings and running == [True] * 3


@pytest.mark.ci
def test_publish_that_did_not_happen_is_found(learning: Trainer) -> None:
    publish = learning.sampler.publish_drafter

    def skip_new(weights: Any, version: int) -> None:
        if version == learning.sampler.drafter_version:  # bound to a new actor
            publish(weights, version)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learning.sampler, "publish_drafter", skip_new)
        step(learning)
    assert learning.sampler.drafter_version == learning.drafter.good.version - 1
    expected = undrafted(learning)
    record, tokens = step(learning)
    assert record["drafter/fault"] == "not as published" and tokens == expected
    assert "not as published" in learning.warnings.pop()
    assert learning.sampler.drafter_version == learning.drafter.good.version


@pytest.mark.ci
def test_publish_that_fails_leaves_the_version_before(learning: Trainer) -> None:
    sampler = learning.sampler
    before = sampler.drafter_weights, sampler.drafter_version, sampler.drafter_params

    def bind(params: Any, weights: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "drafters", SimpleNamespace(bind=bind))
        with pytest.raises(RuntimeError):
            sampler.publish_drafter(put(learning, sampler.drafter_weights), 99)
    after = sampler.drafter_weights, sampler.drafter_version, sampler.drafter_params
    assert all(a is b for a, b in zip(before, after, strict=True))


class Accepting:
    """A sampler of one row whose head gets `rate` drafts a round accepted, as does another."""

    def __init__(self, rate: float, sequences: int = 8) -> None:
        self.rate, self.limits = rate, []
        self.engine = SimpleNamespace(shapes=SimpleNamespace(
            batch=1, sequences=sequences, shards=1, depth=3))

    def probe(self, prompts: Any, limit: np.ndarray, depth: int) -> Any:
        self.limits.append(limit.tolist())
        rounds = int(limit.sum() / (1 + self.rate))
        return SimpleNamespace(counters={"row_rounds": rounds, "accepted": 1000, "broken": 0},
                               by_drafter={"eagle": {"accepted": round(rounds * self.rate)},
                                           "history": {"accepted": 1000}})


@pytest.mark.parametrize("rate, answers", [(0.0, 8), (0.3, 5), (1.05, 2), (2.7, 1)])
def test_probe_of_one_row_generates_enough_to_find_a_dead_head(rate: float, answers: int) -> None:
    sampler = Accepting(rate)
    probe = Probe(sampler, "eagle", [[1]], 8)
    probe.rate = rate
    assert probe.check() == "" and sampler.limits == [[8] * answers + [0] * (8 - answers)]
    sampler.rate = 0.0
    assert probe.check() == ("dead" if rate else "")


def test_probe_of_a_head_that_keeps_losing_fails_in_the_end() -> None:
    sampler = Accepting(2.0)
    probe = Probe(sampler, "eagle", [[1]], 8)
    probe.rate, faults = 2.0, []
    for _ in range(8):
        sampler.rate *= 0.6
        faults.append(probe.check())
    assert not faults[0] and "dead" in faults


@pytest.mark.ci
def test_drafting_is_off_until_there_is_a_good_version(learning: Trainer) -> None:
    """Publishing the last good version again does not help once."""
    manager, publish, failed = learning.drafter, learning.sampler.publish_drafter, []
    expected, zeros = undrafted(learning), SPOILED["zeroed"](weights(learning))
    published(learning, weights=zeros)
    spoiled = learning.sampler.drafter_weights

    def fail_once(new: Any, version: int) -> None:
        publish(new if failed else spoiled, version)
        failed.append(version)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learning.sampler, "publish_drafter", fail_once)
        record, tokens = step(learning)
    assert tokens == expected
    assert record["drafter/fault"] == "zeroed" and record["drafter/disabled"] == 1
    assert record["rollout/accept_length"] == 1 and record["rollout/drafted"] == 0
    learning.warnings.clear()
    assert not manager.disabled and step(learning)[0]["rollout/accept_length"] > 1.1


@pytest.mark.ci
def test_training_compiles_nothing_after_warm_up(learning: Trainer) -> None:
    assert counting(lambda: learning.step()) == 0


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


class Bare:
    """A sampler of a frozen drafter, and nothing else."""

    def __init__(self, head: Any) -> None:
        part = DrafterPart("head", off()._replace(bind=lambda actor, own: {"head": own}), head)
        self.drafters = DrafterSet(part.drafter, (part,))
        self.params, self.broken, self.depths = None, False, []
        self.publish_drafter((head,), 0)

    def publish_drafter(self, weights: Any, version: int) -> None:
        self.drafter_weights, self.drafter_version = tuple(weights), version
        self.drafter_params = self.drafters.bind(self.params, weights)

    def draft_to(self, depth: int | None) -> None:
        self.depths.append(depth)


def manager_of(*shape: int, value: float = 1.0) -> tuple[FrozenDrafter, list[str]]:
    warnings: list[str] = []
    head = {"weights": {"fc": jnp.full(shape, value)}, "vocab": jnp.arange(4)}
    manager = FrozenDrafter(Bare(head), [], 0, warnings.append)
    manager.compile(print)
    return manager, warnings


@pytest.mark.parametrize("value, version", [(1.0, 0), (2.0, 1)])
def test_head_whose_file_was_replaced_is_a_new_version(value: float, version: int) -> None:
    before, _ = manager_of(4, 3)
    before.disabled = True
    after, warnings = manager_of(4, 3, value=value)
    after.restore(before.arrays(), before.meta())
    assert after.good.version == after.sampler.drafter_version == version
    assert after.disabled == (version == 0)
    assert "drafter/fault" not in after.before_rollout(0)
    assert warnings == [] if version == 0 else "than when this run was left" in warnings[0]
    assert after.sampler.depths == ([None] if version else [0])


def test_drafter_of_other_shapes_is_published_again() -> None:
    manager, warnings = manager_of(4, 3)
    other = {"weights": {"fc": jnp.ones((3, 4))}, "vocab": jnp.arange(4)}
    manager.sampler.publish_drafter((other,), 0)
    assert manager.before_rollout(0)["drafter/fault"] == "not as published"
    assert "drafter/fault" not in manager.before_rollout(1) and len(warnings) == 1


def test_manager_of_a_drafter_without_weights_is_null() -> None:
    trainer = micro_trainer_to_compile(config("off", spec__drafter="history"), **INVARIANT)
    assert type(trainer.drafter) is DrafterManager
    assert isinstance(drafters.make(config("off"), Bare({"fc": jnp.ones(2)}), [], print, print),
                      FrozenDrafter)


def test_summaries_tell_what_happened() -> None:
    rng = np.random.default_rng(0)
    tree = {"a": rng.standard_normal((3, 4)).astype(np.float32), "b": np.ones(5, np.float32)}
    vocab, other = np.arange(4, dtype=np.int32), np.array([0, 1, 2, 5], np.int32)
    wanted = summarize({"weights": tree, "vocab": vocab})

    def fault(weights: Any, vocab: Any = vocab) -> str:
        return fault_of(summarize({"weights": weights, "vocab": vocab}), wanted)

    assert fault(tree) == wanted.fault == ""
    turned = tree | {"a": tree["a"][::-1].copy()}
    crossed = tree | {"a": np.concatenate([tree["b"][:1], tree["a"].ravel()[1:]]).reshape(3, 4),
                      "b": np.concatenate([tree["a"].ravel()[:1], tree["b"][1:]])}
    doubled = {k: v * 2 for k, v in tree.items()}
    for changed in (turned, crossed, doubled):
        assert fault(changed) == "not as published"
    assert fault(tree, other) == "not as published"
    assert fault({k: v * 0 for k, v in tree.items()}) == "zeroed"
    assert fault(tree | {"b": tree["b"] * np.nan}) == "not finite"
    small = {k: jnp.asarray(v, jnp.bfloat16) for k, v in tree.items()}
    assert summarize(small) != summarize(small | {"a": small["a"].at[2, 3].add(0.5)})


def test_equal_trees_have_equal_bits() -> None:
    tree = {"a": jnp.asarray([1.0, np.nan]), "b": jnp.arange(3)}
    copied = jax.tree.map(jnp.copy, tree)
    assert equal(tree, tree) and equal(tree, copied)
    assert not equal(tree, copied | {"b": jnp.arange(3) + 1})
    assert not equal(tree, copied | {"b": jnp.arange(4)}) and not equal(tree, {"a": tree["a"]})
