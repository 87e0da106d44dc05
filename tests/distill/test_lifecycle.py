"""Faults of a drafter, in what rollouts read or in its updates: detected, repaired, lossless."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distill_cases import INVARIANT, config
from helpers import counting, micro_config, micro_trainer, micro_trainer_to_compile

from specrl_jax.distill import lifecycle
from specrl_jax.distill.lifecycle import Lifecycle, LifecycleState, VerifiedLifecycle, Version
from specrl_jax.draft.off import off
from specrl_jax.draft.registry import DrafterPart, DrafterSet
from specrl_jax.rollout.state import PublishedDrafter
from specrl_jax.runtime.checksum import checksum
from specrl_jax.structs import Metrics
from specrl_jax.training.state import TrainState
from specrl_jax.training.trainer import Trainer


class Fixed(NamedTuple):
    """A trainer and a state of its run, from which each test goes its own way."""

    trainer: Trainer
    state: TrainState
    warnings: list[str]
    earlier: Version | None = None  # the last good one but one

    @property
    def drafter(self) -> LifecycleState:
        return self.state.drafter

    def verified(self, drafter: LifecycleState) -> tuple[LifecycleState, Metrics]:
        """What precedes a rollout."""
        state = self.state
        return self.trainer.drafter.before_rollout(
            drafter, state.policy, state.speculation, state.step, sample=self._no_sample)

    def trained(self, drafter: LifecycleState) -> tuple[LifecycleState, Metrics]:
        """What follows an update; this one changed nothing."""
        state = self.state
        return self.trainer.drafter.after_update(
            drafter, state.policy, state.speculation, state.step)

    def step(self) -> tuple["Fixed", Metrics, list[Any]]:
        """A whole step, of copies of what it uses up."""
        state = self.state.replace(learner=jax.tree.map(jnp.copy, self.state.learner))
        if state.drafter.online is not None:
            state = state.replace(drafter=state.drafter.replace(online=state.drafter.online.replace(
                features=jax.tree.map(np.copy, state.drafter.online.features))))
        state, record, samples = self.trainer.step(state)
        return self._replace(state=state), record, [sample["tokens"] for sample in samples]

    def generated(self, drafter: LifecycleState) -> "Generated":
        state, rollout, result = self.trainer.generate(self.state.replace(drafter=drafter))
        return Generated(state.drafter, rollout.tokens.tolist(), result.accept_length,
                         sum(nodes["drafted"] for nodes in result.by_drafter.values()))

    def undrafted(self) -> Any:
        return self.generated(enabled(self.drafter, False)).tokens

    def _no_sample(self, number: int) -> Any:
        raise AssertionError("generates responses outside RL")


class Generated(NamedTuple):
    """A rollout of the next step."""

    drafter: LifecycleState
    tokens: Any
    accept_length: float
    drafted: int


def enabled(drafter: LifecycleState, value: bool) -> LifecycleState:
    return drafter.replace(published=drafter.published.replace(enabled=value))


def begun(config: Any) -> Fixed:
    warnings: list[str] = []
    return Fixed(*micro_trainer(config, warn=warnings.append, **INVARIANT), warnings)


@pytest.fixture(scope="module")
def learning() -> Fixed:
    """A drafter that has learned enough for a probe to see that it no longer does."""
    fixed = begun(config("interval", updates=8, learning_rate=4e-3, batch=16, probe_tokens=8))
    state, earlier = fixed.state, None
    for _ in range(24):
        earlier = state.drafter.good
        state, _, _ = fixed.trainer.step(state)
    assert state.drafter.good.number == 24 and not fixed.warnings
    return fixed._replace(state=state, earlier=earlier)


def shuffled(tree: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.permutation(np.asarray(a).reshape(-1)).reshape(a.shape), tree)


SPOILED = {"not finite": lambda tree: jax.tree.map(lambda a: a * np.nan, tree),
           "zeroed": lambda tree: jax.tree.map(lambda a: a * 0, tree), "dead": shuffled}
SPOILED_UNSEEN = SPOILED | {"swapped": lambda tree: jax.tree.map(lambda a: a + 1, tree)}


def put(fixed: Fixed, tree: Any) -> Any:
    return fixed.trainer.sampler.engine.replicate(tree)


def changed(fixed: Fixed, weights: Any, version: int | None = None) -> LifecycleState:
    """Rollouts draft with weights of parts that nobody published."""
    number = fixed.drafter.published.version if version is None else version
    return fixed.drafter.replace(published=fixed.trainer.sampler.publish_drafter(
        fixed.state.policy, weights, number))


def with_head(fixed: Fixed, **head: Any) -> LifecycleState:
    return changed(fixed, (put(fixed, fixed.drafter.published.weights[0] | head),))


def spoiled(fault: str) -> Callable[[Fixed], LifecycleState]:
    return lambda fixed: with_head(fixed, weights=SPOILED_UNSEEN[fault](
        fixed.drafter.published.weights[0]["weights"]))


def other_vocab(fixed: Fixed) -> LifecycleState:
    vocab = np.asarray(fixed.drafter.published.weights[0]["vocab"])
    return with_head(fixed, vocab=np.sort((vocab + 7) % 512).astype(np.int32))


def other_bound(fixed: Fixed) -> LifecycleState:
    """The weights are well, but not what rollouts read."""
    published = fixed.drafter.published
    bound = published.params.replace(embed=published.params.embed + 1)
    return fixed.drafter.replace(published=published.replace(params=bound))


def stale(fixed: Fixed, behind: int = 0) -> LifecycleState:
    assert fixed.earlier is not None
    return changed(fixed, fixed.earlier.weights, fixed.drafter.good.number - behind)


FAULTS = {**{name: spoiled(name) for name in SPOILED_UNSEEN}, "vocabulary map": other_vocab,
          "bound parameters": other_bound, "stale": stale,
          "skipped publish": lambda fixed: stale(fixed, behind=1)}


def named(injected: str) -> str:
    """What `drafter/fault` calls an injected fault."""
    return injected if injected in ("not finite", "zeroed") else "not as published"


@pytest.mark.ci
@pytest.mark.parametrize("fault", FAULTS)
def test_drafter_that_nobody_published_changes_no_token_and_is_repaired(
        fault: str, learning: Fixed) -> None:
    """Unverified it only costs time: drafting stops at scores that are not finite. Verification
    makes the last good version draft at once."""
    before, expected, broken = learning.drafter, learning.undrafted(), fault == "not finite"
    ill = FAULTS[fault](learning)
    unverified = learning.generated(ill)
    assert unverified.tokens == expected and (unverified.drafted == 0) == broken
    assert unverified.drafter.published.enabled != broken
    assert unverified.drafter.faults == before.faults + broken
    if broken:
        assert learning.trained(unverified.drafter)[0].published.enabled

    repaired, record = learning.verified(ill)
    assert record["drafter/fault"] == named(fault) and named(fault) in learning.warnings.pop()
    assert (record["drafter/faults"], record["drafter/disabled"]) == (before.faults + 1, 0)
    assert repaired.published.weights is before.good.weights
    assert repaired.published.version == before.good.number
    drafted = learning.generated(repaired)
    assert drafted.tokens == expected
    assert drafted.accept_length == learning.generated(before).accept_length > 1.1
    assert "drafter/fault" not in learning.verified(repaired)[1] and not learning.warnings


def merged() -> Any:
    return config("interval", probe_tokens=8, spec__drafter="merge", spec__max_nodes=6,
                  spec__nodes=6, draft__parts=("eagle", "draft_model"), draft__model="random:tiny")


@pytest.fixture(scope="module")
def merged_learning() -> Fixed:
    fixed = begun(merged()).step()[0].step()[0]
    assert fixed.drafter.good.number == 2 and not fixed.warnings
    return fixed


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["zeroed", "dead"])
@pytest.mark.parametrize("learns", [True, False], ids=["head", "small model"])
def test_every_part_of_merged_drafters_is_verified(
        learns: bool, fault: str, merged_learning: Fixed) -> None:
    fixed, part = merged_learning, merged_learning.trainer.sampler.drafters.trainable
    weights, part = list(fixed.drafter.published.weights), part if learns else 1 - part
    weights[part] = put(fixed, weights[part] | {
        "weights": SPOILED[fault](weights[part]["weights"])} if learns
                        else SPOILED[fault](weights[part]))
    after, record, tokens = fixed._replace(
        state=fixed.state.replace(drafter=changed(fixed, weights))).step()
    assert record["drafter/fault"] == named(fault) and named(fault) in fixed.warnings.pop()
    assert sorted(tokens) == sorted(fixed.step()[2])
    assert after.drafter.good.number == 3 and after.drafter.published.enabled
    assert "drafter/fault" not in after.verified(after.drafter)[1] and not fixed.warnings


@pytest.mark.ci
@pytest.mark.parametrize("drafter", ["merge", "eagle"])
def test_part_that_is_zero_at_the_start_never_drafts(drafter: str) -> None:
    """No new version of the head merged with it is a reason to."""
    warnings: list[str] = []
    trainer, state = micro_trainer_to_compile(
        merged() if drafter == "merge" else config("off"), warn=warnings.append, **INVARIANT)
    fixed = Fixed(trainer, state, warnings)
    weights = list(state.drafter.published.weights)
    small = drafter == "merge"
    weights[-1] = put(fixed, SPOILED["zeroed"](weights[-1]) if small else weights[-1] | {
        "weights": SPOILED["zeroed"](weights[-1]["weights"])})
    zero = trainer.sampler.publish_drafter(state.policy, weights, 0)
    fixed = fixed._replace(state=trainer.compile(
        state.replace(drafter=trainer.drafter.init(zero)))[0])
    assert "zeroed; nothing is drafted" in warnings.pop()
    for _ in range(2):
        fixed, record, _ = fixed.step()
        assert (record["drafter/disabled"], record["rollout/drafted"]) == (1, 0)
        assert "drafter/fault" not in record
    assert fixed.drafter.good.number == (2 if drafter == "merge" else 0)  # the head learned
    assert not warnings


@pytest.mark.ci
def test_small_model_alone_is_verified() -> None:
    """It learns nothing, so one version drafts, whose checksum every rollout records."""
    fixed = begun(config("off", probe_tokens=8, spec__drafter="draft_model",
                         draft__model="random:tiny"))
    good = fixed.drafter.good
    for fault, spoil in SPOILED_UNSEEN.items():
        repaired, record = fixed.verified(changed(fixed, put(fixed, spoil(good.weights))))
        assert record["drafter/fault"] == named(fault) and named(fault) in fixed.warnings.pop()
        assert repaired.published.weights is good.weights and record["drafter/disabled"] == 0
        assert (record["checksum/drafter"], record["drafter/faults"]) == (checksum(good.weights), 1)
        assert fixed.generated(repaired).tokens == fixed.undrafted()


def spoil_updates(fixed: Fixed, fault: str, patched: pytest.MonkeyPatch) -> None:
    """Each training of the learner ends so."""
    training = fixed.trainer.drafter.training
    train_on = training.train_on

    def spoiling(*batch: Any) -> Any:
        result = train_on(*batch)
        params = put(fixed, SPOILED[fault](result.learner.params))
        return result._replace(learner=result.learner.replace(params=params))

    patched.setattr(training, "train_on", spoiling)


@pytest.mark.ci
@pytest.mark.parametrize("fault", [*SPOILED, "no finite update"])
def test_update_that_spoils_the_drafter_is_not_published(
        fault: str, learning: Fixed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trigger keeps its reference, too: what drafts on is as stale as it was."""
    drafter, training = learning.drafter, learning.trainer.drafter.training
    drafter = drafter.replace(online=drafter.online.replace(
        staleness=drafter.online.staleness.replace(fall=np.asarray(-0.5))))
    with monkeypatch.context() as patched:
        if fault in SPOILED:
            spoil_updates(learning, fault, patched)
        else:
            batches = training.put
            patched.setattr(training, "put", lambda batch: jax.tree.map(
                lambda a: a * np.nan if jnp.issubdtype(a.dtype, jnp.floating) else a,
                batches(batch)))
        after, record = learning.trained(drafter)
    expected = fault if fault in SPOILED else "not finite"
    assert record["drafter/fault"] == expected and expected in learning.warnings.pop()
    assert record["distill/applied"] == float(fault in SPOILED)
    assert after.good is drafter.good and after.published.weights is drafter.good.weights
    assert after.online.staleness.fall == -0.5
    assert learning.generated(after).accept_length > 1.1
    again, record = learning.trained(after)
    assert "drafter/fault" not in record and again.good.number == drafter.good.number + 1
    assert again.online.staleness.fall == 0 and not learning.warnings


@pytest.mark.ci
def test_overlapped_update_that_spoils_it_is_not_published(
        monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = begun(config("interval", overlap=True, probe_tokens=8)).step()[0].step()[0]
    number = fixed.drafter.good.number
    assert fixed.drafter.online.running is not None
    with monkeypatch.context() as patched:
        spoil_updates(fixed, "not finite", patched)
        fixed, record, _ = fixed.step()  # publishes what the step before learned
        assert fixed.drafter.online.result is not None
    assert "drafter/fault" not in record and fixed.drafter.good.number == number + 1
    fixed, record, _ = fixed.step()
    assert record["drafter/fault"] == "not finite" and fixed.drafter.good.number == number + 1
    assert "not finite" in fixed.warnings.pop()
    assert fixed.step()[0].drafter.good.number == number + 2 and not fixed.warnings


@pytest.mark.ci
def test_nothing_is_drafted_until_there_is_a_good_version(
        learning: Fixed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing the last good version again does not help."""
    ill = spoiled("zeroed")(learning)
    with monkeypatch.context() as patched:
        patched.setattr(learning.trainer.sampler, "publish_drafter",
                        lambda *args: ill.published.replace(enabled=args[-1]))
        disabled, record = learning.verified(ill)
    assert record["drafter/fault"] == "zeroed" and record["drafter/disabled"] == 1
    drafted = learning.generated(disabled)
    assert (drafted.drafted, drafted.accept_length) == (0, 1)
    assert drafted.tokens == learning.undrafted()
    after, _ = learning.trained(disabled)
    assert after.published.enabled and learning.generated(after).accept_length > 1.1
    learning.warnings.clear()


@pytest.mark.ci
def test_training_compiles_nothing_after_warm_up(learning: Fixed) -> None:
    learning.step()  # compiles the copies that this test makes of the learner
    assert counting(learning.step) == 0


class Bare:
    """A sampler of a frozen drafter, and nothing else."""

    def __init__(self, head: Any) -> None:
        part = DrafterPart("head", off()._replace(bind=lambda actor, own: {"head": own}), head)
        self.drafters = DrafterSet(part.drafter, (part,))

    def publish_drafter(self, policy: Any, weights: Any, version: int, enabled: bool = True) -> Any:
        return PublishedDrafter(tuple(weights), self.drafters.bind(policy.params, weights), version,
                                enabled)


POLICY: Any = SimpleNamespace(params=None)
NONE: Any = None


def bare(*shape: int, value: float = 1.0) -> tuple[VerifiedLifecycle, LifecycleState, list[str]]:
    warnings: list[str] = []
    sampler: Any = Bare({"weights": {"fc": jnp.full(shape, value)}, "vocab": jnp.arange(4)})
    verified = VerifiedLifecycle(sampler, [], 0, warnings.append)
    initial = verified.init(sampler.publish_drafter(POLICY, sampler.drafters.weights, 0))
    return verified, verified.compile(initial, POLICY, NONE, print), warnings


@pytest.mark.parametrize("value, version", [(1.0, 0), (2.0, 1)])
def test_head_whose_file_was_replaced_is_a_new_version(value: float, version: int) -> None:
    before, left, _ = bare(4, 3)
    left = enabled(left, False)
    after, state, warnings = bare(4, 3, value=value)
    state = after.restore(state, POLICY, before.arrays(left), before.meta(left))
    assert state.good.number == state.published.version == version
    assert state.published.enabled == (version == 1)
    assert "drafter/fault" not in after.before_rollout(state, POLICY, NONE, 0, NONE)[1]
    assert warnings == [] if version == 0 else "than when this run was left" in warnings[0]


def test_drafter_of_other_shapes_is_published_again() -> None:
    verified, state, warnings = bare(4, 3)
    other = bare(3, 4)[1].published
    state, record = verified.before_rollout(state.replace(published=other), POLICY, NONE, 0, NONE)
    assert record["drafter/fault"] == "not as published"
    record = verified.before_rollout(state, POLICY, NONE, 1, NONE)[1]
    assert "drafter/fault" not in record and len(warnings) == 1


def test_drafter_without_weights_needs_no_verification() -> None:
    trainer, _ = micro_trainer_to_compile(config("off", spec__drafter="history"), **INVARIANT)
    assert type(trainer.drafter) is Lifecycle
    sampler: Any = Bare({"fc": jnp.ones(2)})
    assert type(lifecycle.make(micro_config(), sampler, [], print)) is VerifiedLifecycle
