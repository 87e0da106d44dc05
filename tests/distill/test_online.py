"""A drafter that learns beside RL: tokens and actor stay, runs resume exactly, faults are named."""

import copy
import dataclasses
import functools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import counting, micro_config, micro_trainer_to_compile

from specrl_jax import trainer as loop
from specrl_jax.config import (
    ConfigError,
    ControlConfig,
    DistillConfig,
    DraftConfig,
    LearnerConfig,
    MeshConfig,
    ModelSource,
    RewardConfig,
    SpecOptions,
)
from specrl_jax.distill import health
from specrl_jax.distill.losses import LOSSES
from specrl_jax.draft.off import off
from specrl_jax.draft.registry import Drafting
from specrl_jax.io import metrics
from specrl_jax.io.checkpoint import Checkpoints
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.io.progress import Progress
from specrl_jax.run import run_steps
from specrl_jax.trainer import Trainer

SPEC = SpecOptions(drafter="eagle", steps=2, branch=1, nodes=3, max_steps=2, max_branch=1,
                   max_nodes=3)
LEARN = dict(batch=8, micro_batch=8, updates=2, unroll=2, learning_rate=3e-3, canary=4)
MODES = {"every_step": {}, "every_k": {"every": 2, "rollouts": 2}, "once": {"rollouts": 2},
         "overlap": {}, "overlap_k": {"every": 2}, "trigger": {"threshold": 0.0, "memory": 0.0}}
UNEQUAL = ("time/", "memory/", "compilations", "rollout/tokens_per_second")
INVARIANT = dict(num_heads=4, num_kv_heads=2, head_dim=16)  # heads that machine code can take


@pytest.fixture(scope="module", autouse=True)
def programs_on_disk(tmp_path_factory: Any) -> Any:
    """The trainers of this file share what they compile."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("xla")), 0), strict=True):
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def config(when: str, **options: Any) -> Any:
    return micro_config(
        steps=4, spec=SPEC, control=ControlConfig(policy="fixed", min_survival=0.0),
        model=ModelSource(numerics="invariant"), draft=DraftConfig(vocab=256), checkpoint_every=2,
        reward=RewardConfig(terms=("helpers:even",)),
        learner=LearnerConfig(learning_rate=1e-2, micro_batch=16),
        distill=DistillConfig(when=when, **(LEARN | options)))


def run(trainer: Trainer, workdir: Path) -> None:
    """Runs or resumes, as run.train does."""
    with Checkpoints(workdir / "checkpoints", 9) as checkpoints:
        trainer.restore(checkpoints)
        trainer.compile(lambda text: None)
        counter = CompilationCounter()
        with (metrics.Writer(workdir, trainer.step_number) as writer,
              Progress(trainer.config.steps, trainer.step_number) as progress):
            list(run_steps(trainer, checkpoints, writer, progress, counter, {}))


def samples(workdir: Path) -> list[Any]:
    return [{k: v for k, v in s.items() if k != "commits"} for s in metrics.read_samples(workdir)]


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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("when", MODES)
def test_whatever_the_mode_the_actor_is_the_same_and_a_run_resumes_exactly(
        when: str, frozen: Any, tmp_path: Path) -> None:
    still, plain = frozen
    whole = micro_trainer_to_compile(config(when, **MODES[when]), **INVARIANT)
    run(whole, tmp_path / "whole")
    assert samples(tmp_path / "whole") == samples(plain)
    same(whole.state, still.state)
    assert instructions(whole._update) == instructions(still._update)  # the actor's update
    told = metrics.read_metrics(tmp_path / "whole")
    assert [row["compilations"] for row in told] == [0] * 4 and not whole.warnings
    for name in ("loss", "checksum/policy"):
        assert [row[name] for row in told] == [row[name] for row in metrics.read_metrics(plain)]
    assert len({row["checksum/policy"] for row in told}) == 4
    drafted = {row["version/drafter"]: row["checksum/drafter"] for row in told}
    assert [drafted[row["version/drafter"]] for row in told] == [
        row["checksum/drafter"] for row in told] and len({*drafted.values()}) == len(drafted)
    versions = {"every_step": [0, 1, 2, 3], "every_k": [0, 0, 1, 1], "once": [0, 0, 0, 0],
                "overlap": [0, 0, 1, 2], "overlap_k": [0, 0, 0, 1]}
    if when in versions:
        assert [row["version/drafter"] for row in told] == [
            v + (when == "once") for v in versions[when]]
    assert any(row["distill/updates"] == 2 for row in told)
    accounted(told, config(when).distill.megabytes)
    learner = whole.evolution.state.params
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(
        jax.tree.leaves(learner), jax.tree.leaves(still.life.head["weights"]), strict=True))

    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "4")
    parts = micro_trainer_to_compile(config(when, **MODES[when]), **INVARIANT)
    run(parts, tmp_path / "parts")
    assert samples(tmp_path / "parts") == samples(plain)
    rows = [[{k: v for k, v in row.items() if not k.startswith(UNEQUAL)}
             for row in metrics.read_metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert rows[0] == rows[1]
    kept = [{k: v for k, v in t.arrays().items() if k != "drafter_account"} for t in (whole, parts)]
    same(*kept)
    assert whole.meta() == parts.meta()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != DistillConfig().loss])
def test_whatever_the_loss_and_weights_the_actor_is_the_same(
        loss: str, frozen: Any, tmp_path: Path) -> None:
    still, plain = frozen
    whole = micro_trainer_to_compile(config("every_step", loss=loss), **INVARIANT)
    run(whole, tmp_path)
    assert samples(tmp_path) == samples(plain)
    same(whole.state, still.state)
    assert [row["distill/updates"] for row in metrics.read_metrics(tmp_path)] == [2] * 4


@pytest.mark.slow
@pytest.mark.parametrize("when, options", [("off", {}), ("trigger", {"threshold": 1e9})])
def test_a_drafter_that_stands_still_resumes_with_what_is_known_of_it(
        when: str, options: Any, frozen: Any, tmp_path: Path) -> None:
    """A trigger that never fires has watched acceptance fall or rise until the checkpoint."""
    whole = micro_trainer_to_compile(config(when, **options), **INVARIANT)
    whole.life.faults, whole.life.seconds = 3, np.array([5.0, 2.0])
    run(whole, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "4")
    parts = micro_trainer_to_compile(config(when, **options), **INVARIANT)
    run(parts, tmp_path / "parts")
    assert samples(tmp_path / "parts") == samples(tmp_path / "whole") == samples(frozen[1])
    assert whole.meta() == parts.meta() and parts.life.faults == 3
    assert parts.life.seconds[0] > 5
    if when == "trigger":
        same(whole.evolution.staleness, parts.evolution.staleness)
        assert whole.evolution.staleness.fall != 0


@pytest.mark.slow
def test_on_a_mesh_a_drafter_learns_and_the_actor_is_the_same(tmp_path: Path) -> None:
    both = []
    for when in ("off", "every_step"):
        trainer = micro_trainer_to_compile(
            dataclasses.replace(config(when), mesh=MeshConfig(data=2)), **INVARIANT)
        run(trainer, tmp_path / when)
        both.append(trainer)
    assert samples(tmp_path / "off") == samples(tmp_path / "every_step")
    same(both[0].state, both[1].state)
    assert both[1].life.version == 4 and not both[1].warnings


def accounted(rows: list[dict[str, Any]], megabytes: int) -> None:
    """Every step tells seconds spent, saved and their difference; the buffer is in budget."""
    spent, saved = (np.cumsum([row[name] for row in rows])
                    for name in ("time/distill", "time/saved"))
    np.testing.assert_allclose([row["time/net"] for row in rows], saved - spent, atol=1e-9)
    assert all(row["time/distill_updates"] > 0 for row in rows if row["distill/updates"])
    assert all(0 < row["distill/buffer_bytes"] <= megabytes * 2**20 for row in rows)


@pytest.mark.parametrize("learns", [False, True])
def test_a_step_charges_the_drafter_for_all_that_it_took(
        learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the parts of a step move; 4 of the rollout's 10 s more were expected.
    A frozen drafter is looked at too."""
    clock = [0.0]

    def takes(seconds: float, result: Any) -> Any:
        def part(*arguments: Any) -> Any:
            clock[0] += seconds
            return copy.deepcopy(result)

        return part

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    evolution = SimpleNamespace(collect=takes(3, {}), train=takes(5, {})) if learns else None
    life = SimpleNamespace(seconds=np.zeros(2))
    life.account = functools.partial(health.Life.account, life)
    trainer = SimpleNamespace(
        _before_rollout=takes(1, {}), rollout=takes(10, (None, {"time/saved": 4.0})),
        _judge=takes(20, ([], np.ones(4), {})), _advantages=takes(0, np.ones(4)),
        learn=takes(30, {}), evolution=evolution, life=life, config=SimpleNamespace(group_size=2),
        step_number=0)
    told = [Trainer.step(trainer)[0] for _ in range(2)]
    spent = 1 + 3 + 5 if learns else 1
    assert [row["time/distill"] for row in told] == [spent] * 2
    assert [row["time/net"] for row in told] == [4 - spent, 8 - 2 * spent]
    assert [(row["time/reward"], row["time/learn"], row["time/step"]) for row in told] == [
        (20, 30, 60 + spent)] * 2


# Faults. Each is put where rollouts read the drafter, or into what learns.


@pytest.fixture(scope="module")
def learning() -> Trainer:
    """A trainer whose drafter has learned enough for a canary to hear it."""
    trainer = micro_trainer_to_compile(config(
        "every_step", updates=8, learning_rate=4e-3, batch=16, canary=8), **INVARIANT)
    trainer.compile(lambda text: None)
    for _ in range(6):
        trainer.step()
    assert trainer.life.version == 6 and not trainer.warnings
    return trainer


def weights(trainer: Trainer) -> Any:
    return trainer.sampler.own["weights"]


def put(trainer: Trainer, tree: Any) -> Any:
    return trainer.sampler.engine.replicate(tree)


def published(trainer: Trainer, **head: Any) -> None:
    """Rollouts draft with something that nobody published."""
    sampler = trainer.sampler
    sampler.publish_drafter(put(trainer, sampler.own | head), sampler.drafter_version)


def shuffled(tree: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.permutation(np.asarray(a).reshape(-1)).reshape(a.shape), tree)


def stale(trainer: Trainer, version: int) -> None:
    trainer.sampler.publish_drafter(trainer.sampler.own, version)


def other_map(trainer: Trainer) -> Any:
    return np.sort((np.asarray(trainer.sampler.own["vocab"]) + 7) % 512).astype(np.int32)


PUT = {
    "not finite": lambda t: published(t, weights=jax.tree.map(lambda a: a * np.nan, weights(t))),
    "zeroed": lambda t: published(t, weights=jax.tree.map(lambda a: a * 0, weights(t))),
    "shuffled": lambda t: published(t, weights=shuffled(weights(t))),
    "swapped": lambda t: published(t, weights=jax.tree.map(lambda a: a + 1, weights(t))),
    "vocabulary map": lambda t: published(t, vocab=other_map(t)),
}


def step(trainer: Trainer) -> tuple[dict[str, Any], list[Any]]:
    record, said = trainer.step()
    return record, [s["tokens"] for s in said]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*PUT, "stale", "skipped publish"])
def test_a_drafter_that_nobody_published_is_named_before_it_drafts(
        fault: str, learning: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last good version drafts: at once, with the tokens of a run that had no fault."""
    trainer, sampler = learning, learning.sampler
    earlier = sampler.own
    if fault not in PUT:
        step(trainer)  # which publishes the next version
    frozen = trainer.state, trainer.step_number
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "evolution", None)  # the same step twice
        patched.setattr(trainer, "learn", lambda *rollout: {"applied": 1.0})
        well, tokens = step(trainer)
        trainer.step_number, good, before = frozen[1], sampler.own, trainer.life.faults
        if fault in PUT:
            PUT[fault](trainer)
        else:
            sampler.publish_drafter(earlier, trainer.life.version - (fault == "skipped publish"))
        ill, said = step(trainer)
        trainer.step_number = frozen[1]
    assert ill["drafter/fault"] == fault and fault in trainer.warnings.pop()
    assert said == tokens and ill["rollout/accept_length"] == well["rollout/accept_length"] > 1.1
    assert (ill["drafter/faults"], ill["drafter/held"]) == (before + 1, 0)
    assert sampler.own is good and sampler.drafter_version == trainer.life.version
    assert trainer.life.inspect() == ""


@pytest.mark.slow
@pytest.mark.parametrize("fault", PUT)
def test_a_faulty_drafter_that_nobody_looks_at_changes_no_token(
        fault: str, learning: Trainer) -> None:
    expected, good = undrafted(learning), learning.sampler.own
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learning, "evolution", None)
        patched.setattr(learning, "learn", lambda *rollout: {"applied": 1.0})
        patched.setattr(learning.life, "inspect", lambda: "")
        PUT[fault](learning)
        record, tokens = step(learning)
    learning.step_number -= 1
    learning.sampler.publish_drafter(good, learning.life.version)
    assert tokens == expected and "drafter/fault" not in record
    assert (record["rollout/drafted"] > 0) == (fault != "not finite")


@pytest.mark.slow
def test_of_merged_drafters_the_head_is_looked_after(learning: Trainer) -> None:
    """The head is one part of what is published."""
    merged = dataclasses.replace(SPEC, drafter="merge", max_nodes=6, nodes=6)
    trainer = micro_trainer_to_compile(dataclasses.replace(
        config("every_step", canary=8), spec=merged), **INVARIANT)
    trainer.compile(lambda text: None)
    step(trainer), step(trainer)
    assert trainer.life.version == 2 and not trainer.warnings
    sampler, part = trainer.sampler, trainer.sampler.drafting.part
    for fault, spoiled in (("zeroed", SPOILED["zeroed"]), ("shuffled", shuffled)):
        expected, version, own = undrafted(trainer), trainer.life.version, list(sampler.own)
        own[part] = put(trainer, own[part] | {"weights": spoiled(own[part]["weights"])})
        sampler.publish_drafter(tuple(own), version)
        record, tokens = step(trainer)
        assert record["drafter/fault"] == fault and fault in trainer.warnings.pop()
        assert tokens == expected and trainer.life.version == version + 1


def merged_with_a_small_model() -> Any:
    return dataclasses.replace(
        config("every_step", canary=8),
        spec=dataclasses.replace(SPEC, drafter="merge", max_nodes=6, nodes=6),
        draft=DraftConfig(vocab=256, parts=("eagle", "small_lm"), model="random:tiny"))


@pytest.mark.slow
def test_a_small_model_beside_the_head_is_looked_after_too() -> None:
    trainer = micro_trainer_to_compile(merged_with_a_small_model(), **INVARIANT)
    trainer.compile(lambda text: None)
    step(trainer)
    assert not trainer.warnings
    sampler, small = trainer.sampler, 1 - trainer.sampler.drafting.part
    for fault, spoiled in (("zeroed", SPOILED["zeroed"]), ("shuffled", shuffled)):
        expected, version, own = undrafted(trainer), trainer.life.version, list(sampler.own)
        own[small] = put(trainer, spoiled(own[small]))
        sampler.publish_drafter(tuple(own), version)
        record, tokens = step(trainer)
        assert record["drafter/fault"] == fault and fault in trainer.warnings.pop()
        assert tokens == expected and not trainer.life.held
        assert trainer.life.inspect() == "" and not trainer.warnings


@pytest.mark.slow
def test_a_small_model_that_is_dead_when_a_run_begins_drafts_never() -> None:
    """No new version of the head beside it is a reason to."""
    trainer = micro_trainer_to_compile(merged_with_a_small_model(), **INVARIANT)
    sampler = trainer.sampler
    small, own = 1 - sampler.drafting.part, list(sampler.own)
    own[small] = put(trainer, SPOILED["zeroed"](own[small]))
    sampler.publish_drafter(tuple(own), 0)
    trainer.compile(lambda text: None)
    assert "zeroed; nothing is drafted" in trainer.warnings.pop()
    told = [step(trainer)[0] for _ in range(2)]
    assert trainer.life.version == 2 and not trainer.warnings  # the head learned
    assert [(row["drafter/held"], row["rollout/drafted"]) for row in told] == [(1, 0)] * 2


@pytest.mark.slow
def test_a_head_that_is_dead_when_a_run_begins_is_named(frozen: Any) -> None:
    trainer = micro_trainer_to_compile(config("off"), **INVARIANT)
    published(trainer, weights=SPOILED["zeroed"](weights(trainer)))
    trainer.compile(lambda text: None)
    assert "zeroed; nothing is drafted" in trainer.warnings.pop()
    record, tokens = step(trainer)
    assert record["drafter/held"] == 1 and record["rollout/drafted"] == 0
    assert tokens == [s["tokens"] for s in metrics.read_samples(frozen[1]) if s["step"] == 0]


@pytest.mark.slow
def test_a_small_model_is_looked_after_too() -> None:
    """It learns nothing, so one version drafts, whose checksum every rollout records."""
    trainer = micro_trainer_to_compile(dataclasses.replace(
        config("off", canary=8), spec=dataclasses.replace(SPEC, drafter="small_lm"),
        draft=DraftConfig(model="random:tiny")), **INVARIANT)
    trainer.compile(lambda text: None)
    sampler, good, told = trainer.sampler, trainer.sampler.own, [step(trainer)[0]]
    for fault, spoiled in (SPOILED | {"shuffled": shuffled, "swapped": lambda tree: jax.tree.map(
            lambda a: a + 1, tree)}).items():
        if fault == "dead canary":  # of what learns
            continue
        expected = undrafted(trainer)
        sampler.publish_drafter(put(trainer, spoiled(good)), 0)
        record, tokens = step(trainer)
        told.append(record)
        assert record["drafter/fault"] == fault and fault in trainer.warnings.pop()
        assert tokens == expected and sampler.own is good and record["drafter/held"] == 0
    assert [row["version/drafter"] for row in told] == [0] * 5
    assert {row["checksum/drafter"] for row in told} == {health.checksum(good)}
    assert [row["drafter/faults"] for row in told] == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["not finite", "zeroed", "shuffled", "vocabulary map"])
def test_a_learner_that_was_damaged_goes_back_to_what_it_published(
        fault: str, learning: Trainer) -> None:
    evolution, version = learning.evolution, learning.life.version
    broken = {"not finite": lambda a: a * np.nan, "zeroed": lambda a: a * 0}
    params = evolution.state.params
    if fault in broken:
        params = jax.tree.map(broken[fault], params)
    if fault == "shuffled":
        params = shuffled(params)
    if fault == "vocabulary map":
        evolution.vocab = put(learning, other_map(learning))
    evolution.state = evolution.state.replace(params=put(learning, params))
    expected = undrafted(learning)
    record, tokens = step(learning)
    assert record["drafter/fault"] == fault and fault in learning.warnings.pop()
    assert tokens == expected
    assert learning.life.version == version + 1  # one training on, from the version before
    assert step(learning)[0]["rollout/accept_length"] > 1.1


SPOILED = {"not finite": lambda tree: jax.tree.map(lambda a: a * np.nan, tree),
           "zeroed": lambda tree: jax.tree.map(lambda a: a * 0, tree),
           "dead canary": lambda tree: shuffled(tree)}


def spoil(trainer: Trainer, fault: str, patched: pytest.MonkeyPatch) -> None:
    """Each update of the learner ends so."""
    update = trainer.evolution._update

    def spoiling(*batch: Any) -> Any:
        state, told = update(*batch)
        return state.replace(params=put(trainer, SPOILED[fault](state.params))), told

    patched.setattr(trainer.evolution, "_update", spoiling)


def undrafted(trainer: Trainer) -> list[Any]:
    """The tokens of the next step, which is not taken."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "evolution", None)
        patched.setattr(trainer, "life", None)
        patched.setattr(trainer, "learn", lambda *rollout: {"applied": 1.0})
        trainer.sampler.draft_to(0)
        record, tokens = step(trainer)
    trainer.sampler.draft_to(None)
    trainer.step_number -= 1
    assert record["rollout/drafted"] == 0
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("fault", SPOILED)
def test_an_update_that_spoils_the_drafter_is_not_published(fault: str, learning: Trainer) -> None:
    """Nor has the trigger another reference: what drafts on is as stale as it was."""
    version, good, evolution = learning.life.version, learning.sampler.own, learning.evolution
    evolution.staleness = evolution.staleness.replace(fall=np.asarray(-0.5))
    with pytest.MonkeyPatch.context() as patched:
        spoil(learning, fault, patched)
        record, _ = step(learning)
    assert record["drafter/fault"] == fault and fault in learning.warnings.pop()
    assert learning.life.version == version and learning.sampler.own is good
    assert evolution.staleness.fall == -0.5
    expected = undrafted(learning)
    record, tokens = step(learning)
    assert tokens == expected and record["rollout/accept_length"] > 1.1
    assert "drafter/fault" not in record and learning.life.version == version + 1
    assert evolution.staleness.fall == 0


@pytest.mark.slow
def test_a_learner_none_of_whose_updates_is_finite_is_named(learning: Trainer) -> None:
    version, good, lessons = learning.life.version, learning.sampler.own, learning.evolution._put
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learning.evolution, "_put", lambda batch: jax.tree.map(
            lambda a: a * np.nan if jnp.issubdtype(a.dtype, jnp.floating) else a, lessons(batch)))
        record, _ = step(learning)
    assert record["drafter/fault"] == "not finite" and record["distill/applied"] == 0
    assert "not finite" in learning.warnings.pop()
    assert learning.life.version == version and learning.sampler.own is good
    record, _ = step(learning)
    assert "drafter/fault" not in record and learning.life.version == version + 1


@pytest.mark.slow
def test_a_late_update_that_spoils_the_drafter_is_not_published() -> None:
    trainer = micro_trainer_to_compile(config("overlap", canary=8), **INVARIANT)
    trainer.compile(lambda text: None)
    step(trainer), step(trainer)
    trainer.evolution._join()  # these updates are well
    version, learn, beside = trainer.life.version, trainer.learn, []

    def watched(*rollout: Any) -> dict[str, Any]:
        beside.append(trainer.evolution._ahead is not None)
        return learn(*rollout)

    trainer.learn = watched
    with pytest.MonkeyPatch.context() as patched:
        spoil(trainer, "not finite", patched)
        record, _ = step(trainer)  # publishes what the step before learned
        trainer.evolution._join()
    assert "drafter/fault" not in record and trainer.life.version == version + 1
    expected = undrafted(trainer)
    record, tokens = step(trainer)
    assert record["drafter/fault"] == "not finite" and trainer.life.version == version + 1
    assert tokens == expected and "not finite" in trainer.warnings.pop()
    step(trainer)
    assert trainer.life.version == version + 2 and not trainer.warnings and beside == [True] * 3


@pytest.mark.slow
def test_a_publish_that_did_not_happen_is_named(learning: Trainer) -> None:
    publish = learning.sampler.publish_drafter

    def skip_new(own: Any, version: int) -> None:
        if version == learning.sampler.drafter_version:  # bound to a new actor
            publish(own, version)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learning.sampler, "publish_drafter", skip_new)
        step(learning)
    assert learning.sampler.drafter_version == learning.life.version - 1
    expected = undrafted(learning)
    record, tokens = step(learning)
    assert record["drafter/fault"] == "skipped publish" and tokens == expected
    assert "skipped publish" in learning.warnings.pop()
    assert learning.sampler.drafter_version == learning.life.version


@pytest.mark.slow
def test_a_publish_that_fails_leaves_what_was_there(learning: Trainer) -> None:
    sampler = learning.sampler
    before = sampler.own, sampler.drafter_version, sampler.drafter_params

    def bind(params: Any, own: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler.engine, "machine",
                        SimpleNamespace(drafter=SimpleNamespace(bind=bind)))
        with pytest.raises(RuntimeError):
            sampler.publish_drafter(put(learning, sampler.own), 99)
    after = sampler.own, sampler.drafter_version, sampler.drafter_params
    assert all(a is b for a, b in zip(before, after, strict=True))


class Heard:
    """A sampler of one row whose head gets `rate` drafts a round accepted, beside another's."""

    def __init__(self, rate: float, sequences: int = 8) -> None:
        self.rate, self.asked = rate, []
        self.engine = SimpleNamespace(shapes=SimpleNamespace(
            batch=1, sequences=sequences, shards=1, depth=3))
        self.drafting = SimpleNamespace(
            part=1, drafter=SimpleNamespace(names=("history", "eagle")))
        self.drafter_version = 0

    def canary(self, prompts: Any, limit: np.ndarray, depth: int) -> Any:
        self.asked.append(limit.tolist())
        rounds = int(limit.sum() / (1 + self.rate))
        return SimpleNamespace(
            counters={"row_rounds": rounds, "accepted": 1000, "broken": 0},
            by_drafter={"eagle": {"accepted": round(rounds * self.rate)},
                        "history": {"accepted": 1000}})


@pytest.mark.parametrize("rate, answers", [(0.0, 8), (0.3, 5), (1.05, 2), (2.7, 1)])
def test_a_canary_of_one_row_asks_as_much_as_tells_a_dead_head(rate: float, answers: int) -> None:
    sampler = Heard(rate)
    life = health.Life(sampler, [[1]], 8, print)
    life._rate = rate
    assert life._try() == "" and sampler.asked == [[8] * answers + [0] * (8 - answers)]
    sampler.rate = 0.0
    assert life._try() == ("dead canary" if rate else "")


def test_a_head_that_loses_a_little_at_each_publish_is_named_in_the_end() -> None:
    sampler = Heard(2.0)
    life = health.Life(sampler, [[1]], 8, print)
    life._rate, faults = 2.0, []
    for _ in range(8):
        sampler.rate *= 0.6
        faults.append(life._try())
    assert not faults[0] and "dead canary" in faults


@pytest.mark.slow
def test_without_a_good_version_nothing_is_drafted_until_there_is_one(learning: Trainer) -> None:
    life, good = learning.life, learning.sampler.own
    expected = undrafted(learning)
    published(learning, weights=jax.tree.map(lambda a: a * 0, weights(learning)))
    life._good = learning.sampler.own  # the copy that would help is gone too
    record, tokens = step(learning)
    assert tokens == expected
    assert record["drafter/fault"] == "zeroed" and record["drafter/held"] == 1
    assert record["rollout/accept_length"] == 1 and record["rollout/drafted"] == 0
    learning.warnings.clear()
    life._good = good
    record, _ = step(learning)
    assert not life.held and step(learning)[0]["rollout/accept_length"] > 1.1


@pytest.mark.slow
def test_training_compiles_nothing_after_warm_up(learning: Trainer) -> None:
    assert counting(lambda: learning.step()) == 0


@pytest.mark.parametrize("changes, message", [
    ({"spec": dataclasses.replace(SPEC, drafter="history")}, "distill.when = 'once': spec.drafter "
     "= 'history' .* has nothing that learns; choose eagle"),
    ({"distill": DistillConfig(when="once", batch=64)}, "distill.batch = 64: 1 x 16 sequences are"),
    ({"distill": DistillConfig(when="overlap", **LEARN), "mesh": MeshConfig(data=2)},
     "distill.when = 'overlap': two programs at once over 2 devices"),
    ({"distill": DistillConfig(when="once", batch=9, micro_batch=9), "mesh": MeshConfig(data=2)},
     "distill.micro_batch = 9: must be a multiple of the 2 data shards"),
    ({"distill": DistillConfig(when="once", megabytes=1, batch=2048, rollouts=200)},
     "distill.megabytes = 1: an update of 2048 sequences and 1 heads take"),
])
def test_what_cannot_work_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        micro_trainer_to_compile(dataclasses.replace(config("once"), **changes), **INVARIANT)


@pytest.mark.parametrize("changes, message", [
    ({"when": "often"}, "distill.when = 'often': choose one of off, once"),
    ({"loss": "mse"}, "distill.loss = 'mse': choose one of forward_kl"),
    ({"batch": 12}, "distill.batch = 12: must be a multiple of distill.micro_batch = 8"),
    ({"memory": 1.0}, r"distill.memory = 1.0: must lie in \[0, 1\)"),
    ({"every": 0}, "distill.every = 0: must be at least 1"),
])
def test_options_are_checked(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistillConfig(**changes)


@pytest.mark.parametrize("value, version, held", [(1.0, 0, True), (2.0, 1, False)])
def test_a_head_that_was_replaced_is_a_new_version(value: float, version: int, held: bool) -> None:
    told: list[str] = []

    def life(value: float) -> health.Life:
        head = {"weights": {"fc": jnp.full((4, 3), value)}, "vocab": np.arange(4)}
        sampler = SimpleNamespace(
            drafting=Drafting(off(), head=SimpleNamespace()), drafter_version=0, own=head,
            drafter_params=SimpleNamespace(head=None, **head), params=None,
            draft_to=lambda depth: told.append(f"draft to {depth}"))
        sampler.publish_drafter = lambda own, version: vars(sampler).update(drafter_version=version)
        return health.Life(sampler, [], 0, told.append)

    before, after = life(1.0), life(value)
    before._known, before.held = {0: before._print(before.head)}, True
    after.restore(before.meta())
    assert after.version == after.sampler.drafter_version == version and after.held == held
    assert after._look() == "" and after.inspect() == ""
    assert (told == []) == held
    assert held or ("other weights than when this run was left" in told[0]
                    and told[1:] == ["draft to None"])


def test_a_drafter_of_other_shapes_is_swapped() -> None:
    def head(*shape: int) -> dict[str, Any]:
        return {"weights": {"fc": np.ones(shape, np.float32)}, "vocab": np.arange(4)}

    sampler = SimpleNamespace(drafting=Drafting(off(), head=SimpleNamespace()),
                              drafter_params=SimpleNamespace(head=None, **head(4, 3)),
                              drafter_version=0, params=None)
    life = health.Life(sampler, [], 0, print)
    life._good = head(3, 4)
    life._known = {0: health.fingerprint(**head(3, 4))}
    assert life._look() == "swapped"
    sampler.drafter_params = SimpleNamespace(head=None, **head(3, 4))
    assert life._look() == ""


def test_rows_that_score_drafts_are_the_published_actors_of_the_draft_vocabulary() -> None:
    actor, vocab = {"embed": jnp.arange(16.0).reshape(8, 2)}, jnp.asarray([1, 4, 6])
    arch = SimpleNamespace(actor=SimpleNamespace(tied=True, vocab_size=8), draft_vocab=3)
    life = health.Life(SimpleNamespace(
        drafting=SimpleNamespace(head=arch), params=actor, drafter_version=0), [], 0, print)

    def others(rows: Any) -> bool:
        return life._scores_others(SimpleNamespace(head=rows, vocab=vocab))

    assert not others(actor["embed"][vocab]) and not others(None)  # None: the drafter's own
    assert others(actor["embed"][vocab + 1]) and others(actor["embed"][vocab] * 2)
    arch.draft_vocab = 8  # whole: no copy is made, so another array is an older actor's
    assert not others(actor["embed"]) and others(actor["embed"] + 0)


def test_fingerprints_tell_what_happened() -> None:
    rng = np.random.default_rng(0)
    tree = {"a": rng.standard_normal((3, 4)).astype(np.float32), "b": np.ones(5, np.float32)}
    vocab, other = np.arange(4, dtype=np.int32), np.array([0, 1, 2, 5], np.int32)
    wanted = health.fingerprint(tree, vocab)
    name = lambda t, v=vocab, known=None: health.name_fault(  # noqa: E731
        health.fingerprint(t, v), wanted, known or {})
    assert name(tree) == "" and wanted.finite and not wanted.zero
    turned = tree | {"a": tree["a"][::-1].copy()}
    crossed = tree | {"a": np.concatenate([tree["b"][:1], tree["a"].ravel()[1:]]).reshape(3, 4),
                      "b": np.concatenate([tree["a"].ravel()[:1], tree["b"][1:]])}
    assert name(turned) == name(crossed) == "shuffled"
    assert name(tree, other) == "vocabulary map"
    assert name({k: v * 0 for k, v in tree.items()}) == "zeroed"
    assert name(tree | {"b": tree["b"] * np.nan}) == "not finite"
    doubled = {k: v * 2 for k, v in tree.items()}
    assert name(doubled) == "swapped"
    assert name(doubled, vocab, {3: health.fingerprint(doubled, vocab)}) == "stale"
    small = {k: jnp.asarray(v, jnp.bfloat16) for k, v in tree.items()}
    assert health.checksum(small) != health.checksum(
        small | {"a": small["a"].at[2, 3].add(0.5)})
