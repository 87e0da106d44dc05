"""A drafter that learns from what verification computed: records, targets, exploring rounds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distill_cases import INVARIANT, config
from helpers import micro_trainer, micro_trainer_to_compile

from specrl_jax.config import ConfigError
from specrl_jax.control.protocol import NEVER_REPLAN
from specrl_jax.distill import teacher
from specrl_jax.distill.online import batch_of
from specrl_jax.rl.experience import build_experience, keys_of
from specrl_jax.rollout import record
from specrl_jax.rollout.plan import NOT_FORCED, explores
from specrl_jax.structs import DraftTree, Frontier, Path, Records, SlotFill, Verdict, carrier

D, FREE = 3, [NOT_FORCED, NOT_FORCED]

#      0 root
#     / |
#    1  2        the actor drew 2's token at the root, 4's at 2 and 6's at 4
#   /   | |
#  3    4 5
#       |
#       6
PARENT = np.asarray([[0, 0, 0, 1, 2, 2, 4]], np.int32)


def added(origins: list[int], live: list[int], count: int, start: Records) -> Records:
    """Records after a round of one row, which holds sequence 1 of 2."""
    one = jnp.ones(1, jnp.int32)
    zero = jnp.zeros((1, 7))
    tree = DraftTree(tokens=zero, parent=jnp.asarray(PARENT), depth=zero, rank=zero,
                     origin=jnp.asarray([origins]), survival=zero, logq=zero, draft_prob=zero,
                     score_gap=zero, live=jnp.asarray([live], bool), broken=one)
    verdict = carrier(Verdict, tokens=zero, logprob=zero, raw_logprob=zero, top_p_mass=zero,
                      path=jnp.asarray([[0, 2, 4, 6]]), count=count * one, stopped=one)
    frontier = Frontier(root=one, seq=one, generated=2 * one, context=5 * one, live=one > 0)
    states = jnp.arange(1.0, 5)[None, :, None]
    path = carrier(Path, kv=(), taps=None, draw=zero, verified=zero, states=states)
    return jax.tree.map(np.asarray, record.add(start, 1, tree, frontier, verdict, path))


@pytest.mark.parametrize("origins, live, depth", [
    ([0, 1, 0, 0, 0, 1, 1], [1] * 7, [0, 1, 2, -1]),
    ([0, 0, 0, 1, 1, 0, 0], [1] * 7, [-1, 1, -1, -1]),  # another drafter's below the root and 4
    ([0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0], [0, 1, -1, -1]),
    ([0] * 7, [1, 0, 0, 0, 0, 0, 0], [-1] * 4)])
def test_nodes_that_the_drafter_expanded_are_recorded(
        origins: list[int], live: list[int], depth: list[int]) -> None:
    start = jax.tree.map(jnp.asarray, record.blank(2, 9, 6, 1, D, np.float32))
    after = added(origins, live, 4, start)
    assert after.depth[1, 2:6].tolist() == depth and (after.depth[1, :2] == -1).all()
    assert after.states[1, 5:9, 0].tolist() == [1, 2, 3, 4]
    assert (after.depth[0] == -1).all() and (after.states[0] == 0).all()
    same = added(origins, live, 0, start)  # a row that is not live commits nothing
    jax.tree.map(np.testing.assert_array_equal, same, jax.tree.map(np.asarray, start))


def test_prompts_are_recorded_where_they_are_seated() -> None:
    start = jax.tree.map(jnp.asarray, record.blank(4, 5, 4, 3, D, np.float32))
    taps = jnp.arange(12.0).reshape(2, 2, 3)  # of 2 prompts of 3 positions

    def fill(seq: list[int], **given: Any) -> SlotFill:
        fields = dict.fromkeys(("source", "copy", "root", "length"), [-1, -1]) | given | {
            "seq": seq}
        return SlotFill(**{name: jnp.asarray(value) for name, value in fields.items()})

    first = record.prefill(start, fill([2, 0], source=[1, 0]), taps)
    np.testing.assert_array_equal(first.states[2, :3, :2], taps[:, 1].T)
    np.testing.assert_array_equal(first.states[0, :3, :2], taps[:, 0].T)
    assert (first.states[:, :, 2] == 0).all() and (first.states[1::2] == 0).all()
    # Slot 0 goes on with a sibling of its own sequence, slot 1 with a copy from slot 0.
    then = record.copy_prompt(first, fill([3, 1], copy=[0, 0]), jnp.asarray([2, 0]), 3)
    for row in (1, 2, 3):
        np.testing.assert_array_equal(then.states[row], first.states[2])
    np.testing.assert_array_equal(then.states[0], first.states[0])


def test_anchors_are_trained_at_the_depth_they_were_drafted_at() -> None:
    drafted = jnp.asarray([[0, 1, -1, 0, 1, 2]])
    got = teacher.live_anchors(jnp.asarray([7]), jnp.asarray([2]), drafted, 3)  # 5 tokens
    assert np.argwhere(np.asarray(got)[:, 0]).tolist() == [[0, 0], [0, 3], [1, 0], [1, 3]]
    every = teacher.live_anchors(
        jnp.asarray([7]), jnp.asarray([2]), jnp.full((1, 6), teacher.EVERY), 3)
    assert np.asarray(every).sum((1, 2)).tolist() == [5, 4, 3]


def test_rounds_explore_by_their_index_where_nothing_is_forced() -> None:
    decoder: Any = type("Decoder", (), {"explore": 4, "drafter": type("D", (), {"depth": D})})
    got = [explores(decoder, jnp.int32(i), jnp.asarray(FREE)) for i in range(9)]
    assert [bool(asks) for asks, _ in got] == [i % 4 == 0 for i in range(9)]
    assert [int(until) for _, until in got] == [4, 3, 2, 1, 4, 3, 2, 1, 4]
    for forced in ([0, NOT_FORCED], [2, 1]):  # a drafter that is switched off, a measurement
        assert not explores(decoder, jnp.int32(0), jnp.asarray(forced))[0]
    decoder.explore = 0
    assert int(explores(decoder, jnp.int32(0), jnp.asarray(FREE))[1]) == NEVER_REPLAN


@pytest.mark.ci
@pytest.mark.parametrize("drafter", ["eagle", "bigram:bigram"])
def test_targets_are_those_of_a_forward_of_the_actor(drafter: str) -> None:
    trainer, state = micro_trainer(config("verification", spec__drafter=drafter, draft__vocab=0),
                                   **INVARIANT)
    state, rollout, _ = trainer.generate(state)
    experience = build_experience(
        trainer.config, trainer.algorithm, [trainer.reward(rollout, state.learner)],
        keys_of(rollout, trainer.config.group_size), state.policy.version)
    rollout, online = experience.rollout, trainer.drafter.training
    chosen = np.arange(len(rollout.length))
    batch = batch_of(experience, chosen, 8, online.ring.sizes.columns, 1.0)
    got = jax.tree.map(np.asarray, online._targets(state.policy, batch, experience, chosen))
    want = jax.tree.map(np.asarray, online._programs.compute_targets(
        online.ring.sizes.window, state.policy.params, online._programs.rows(batch)))
    length, first = (np.asarray(a)[..., None] for a in (batch.length, batch.first))
    # The last token of a sequence is never run.
    known = np.arange(batch.tokens.shape[-1]) < length - 1
    tokens = np.arange(got.hidden.shape[-1]) < length - first
    for name, real in (("taps", known), ("hidden", tokens)):
        mask = np.broadcast_to(real[:, None], getattr(want, name).shape)
        np.testing.assert_allclose(getattr(got, name)[mask], getattr(want, name)[mask], atol=1e-4)
    np.testing.assert_allclose(got.normalizer[tokens], want.normalizer[tokens], atol=1e-4)
    within = np.stack([np.concatenate([*map(np.arange, commits), np.zeros(99)])[: tokens.shape[-1]]
                       for commits in rollout.commits]).reshape(tokens.shape)
    drafted = got.drafted[tokens]
    assert ((drafted == within[tokens]) | (drafted == -1)).all() and (drafted == 0).any()


def rates(policy: str) -> tuple[list[float], list[float]]:
    """Accept lengths and first acceptances over 24 steps from random weights."""
    trainer, state = micro_trainer(config(
        "verification", control__policy=policy, control__min_survival=0.3, explore=0.25,
        learning_rate=1e-2, learner__learning_rate=1e-6, updates=4, rollout__temperature=0.2,
        model__numerics="default"))
    rows = []
    for _ in range(24):
        state, row, _ = trainer.step(state)
        rows.append(row)
    assert state.drafter.good.number == 24
    return [row["rollout/accept_length"] for row in rows], [row["distill/alpha/0"] for row in rows]


@pytest.mark.ci
@pytest.mark.parametrize("policy", ["fixed", "budget"])
def test_random_head_learns_from_exploring_rounds(policy: str) -> None:
    length, alpha = rates(policy)
    assert np.mean(alpha[-4:]) > 2 * np.mean(alpha[:4])
    assert np.mean(length[-4:]) > np.mean(length[:4])


@pytest.mark.parametrize("changes, message", [
    (dict(control__policy="off"), "control.policy = 'off' has nothing that learns"),
    (dict(rollout__repetition_penalty=1.2), "rollout.repetition_penalty = 1.2: distill.when = "),
    (dict(explore=0.0), "distill.explore = 0.0: must lie in"),
    (dict(spec__drafter="merge", spec__max_nodes=5, draft__parts=("bigram:bigram", "eagle")),
     "draft.parts = .*: distill.when = 'verification' needs")])
def test_options_that_cannot_work_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        micro_trainer_to_compile(config("verification", **changes), **INVARIANT)
