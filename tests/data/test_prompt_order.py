"""Which prompts a step uses, and which of their groups it learns from."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from specrl_jax.config import Config, ConfigError, DataConfig, RLConfig, RolloutConfig
from specrl_jax.data.prompt_order import PromptOrder, advance, observe
from specrl_jax.rl import experience
from specrl_jax.rl.algorithm import resolve
from specrl_jax.rl.programs import blank_rollout
from specrl_jax.structs import Scores


def order(prompts: int = 12, seed: int = 0, **rl) -> PromptOrder:
    return PromptOrder(Config(prompts_per_step=4, seed=seed, rl=RLConfig(**rl)), prompts)


def rewards(*means: float) -> np.ndarray:
    return np.repeat(np.float32(means)[:, None], 2, 1)


def test_filter_goes_on_where_the_last_step_ended() -> None:
    moving, seen = order(filter="dynamic"), []
    history = moving.init()
    for step, batches in enumerate((1, 3, 2)):
        indices = moving.indices(history, step, 4 * batches)
        np.testing.assert_array_equal(indices[:4], moving.indices(history, step, 4))
        history = advance(observe(history, indices, rewards(*[0.0] * len(indices))), len(indices))
        seen += indices.tolist()
    assert seen == order().indices(moving.init(), 0, 24).tolist()


def test_observing_leaves_the_earlier_history_as_it_was() -> None:
    curriculum = order(curriculum="pass_rate")
    before = curriculum.init()
    after = observe(before, curriculum.indices(before, 0, 8), rewards(*np.linspace(-1, 2, 8)))
    assert before.drawn == 0 and not before.tried.any() and not before.passed.any()
    assert curriculum.indices(after, 1, 12).tolist() != curriculum.indices(before, 1, 12).tolist()


def test_pass_rate_prefers_prompts_near_one_half() -> None:
    curriculum = order(curriculum="pass_rate")
    history = curriculum.init()
    for _ in range(50):  # of 12 prompts the first four are solved half the time, others always
        history = observe(history, np.arange(12), rewards(*[0.5] * 4, *[1.0] * 4, *[0.0] * 4))
    drawn = np.concatenate([curriculum.indices(history, step, 4) for step in range(300)])
    counts = np.bincount(drawn, minlength=12)
    assert all(len(set(curriculum.indices(history, step, 12))) == 12 for step in range(9))
    assert counts[:4].min() > 200 and 20 < counts[4:].min() and counts[4:].max() < 120
    other = order(seed=1, curriculum="pass_rate")
    blank = other.init()
    assert other.indices(blank, 0, 12).tolist() != curriculum.indices(blank, 0, 12).tolist()


@pytest.mark.parametrize("useful, groups", [
    ([0, 1, 1, 0, 1, 1], [1, 2, 4]), ([1, 0, 0, 0, 0, 1], [0, 1, 5]), ([0] * 6, [0, 1, 2])])
def test_first_useful_groups_are_chosen(useful: list[int], groups: list[int]) -> None:
    advantage = np.float32([[x, -x] for x in useful])
    np.testing.assert_array_equal(experience.choose_groups(advantage, 3), groups)


CONFIG = Config(prompts_per_step=2, group_size=2, rl=RLConfig(overlong="soft"),
                rollout=RolloutConfig(max_new_tokens=20))
GROUP = resolve(RLConfig(advantage="group"))


def rewarded(config: Config, rewards: list[list[float]], **fields: Any) -> experience.Rewarded:
    """Groups of two in the order of their ids, as rollouts have them, with the given rewards."""
    values = np.float32(rewards).reshape(-1)
    rollout = blank_rollout(config).replace(
        occurrence=np.zeros(len(values), np.int32),
        sample_id=np.tile(np.int32([0, 1]), len(rewards)), **fields)
    scores = Scores([{"reward": float(x)} for x in values], values, {"reward/failures": 0})
    return experience.reward_rollout(config, GROUP, rollout, lambda _: scores, lambda _: values)


def test_groups_fill_the_batch_in_the_order_of_draws() -> None:
    drawn = [(0, 5, 0), (0, 1, 0), (0, 3, 0), (0, 0, 0)]
    rollouts = [rewarded(CONFIG, [[1, 1], [0, 1]], prompt_id=np.int32([1, 1, 5, 5])),
                rewarded(CONFIG, [[0, 1], [1, 0]], prompt_id=np.int32([0, 0, 3, 3]))]
    batch = experience.build_experience(CONFIG, GROUP, rollouts, drawn, version=0)
    assert batch.rollout.prompt_id.tolist() == [3, 3, 5, 5]  # not 0, which was drawn after 3
    assert batch.metrics["reward/nonzero_advantage_fraction"] == 0.75
    assert [sample["reward"] for sample in batch.samples] == [1, 0, 0, 1]


def test_soft_penalty_by_hand() -> None:
    # Free up to 16 of 20 tokens, then 1/4 a token.
    lengths = np.int32([16, 17, 20, 1])
    np.testing.assert_allclose(experience.overlong_penalty(CONFIG, blank_rollout(CONFIG).replace(
        length=lengths)), [0, -0.25, -1, 0])
    one = rewarded(CONFIG, [[1, 1], [1, 1]], prompt_id=np.int32([0, 0, 1, 1]), length=lengths)
    np.testing.assert_allclose(one.shaped, [1, 0.75, 0, 1])
    assert one.useful == 0  # the filter goes by the rewards alone


def test_masked_responses_have_no_tokens_and_no_advantage() -> None:
    config = dataclasses.replace(CONFIG, rl=RLConfig(overlong="mask"))
    lengths, stopped = np.int32([6, 10, 10, 1]), np.array([True, False, True, True])
    one = rewarded(config, [[0, 1], [0, 1]], prompt_id=np.int32([0, 0, 1, 1]), length=lengths,
                 stopped=stopped)
    batch = experience.build_experience(config, GROUP, [one], [(0, 0, 0), (0, 1, 0)], version=0)
    np.testing.assert_array_equal(batch.learned.length, [6, 0, 10, 1])
    np.testing.assert_array_equal(batch.rollout.length, lengths)
    np.testing.assert_array_equal(batch.advantage == 0, ~stopped)
    np.testing.assert_array_equal(one.shaped, one.scores.rewards)


@pytest.mark.parametrize("values, words", [
    (dict(prompts_per_step=1, rl=dict(filter="dynamic")), "prompts_per_step = 1: rl.filter = dyn"),
    (dict(rl=dict(filter="dynamic", teacher="x")), "rl.filter = 'dynamic': with a teacher, groups"),
    (dict(rl=dict(filter="dynamic", advantage="batch")), "rl.filter = 'dynamic': rl.advantage = b"),
    (dict(rl=dict(overlong="cut")), "rl.overlong = 'cut': choose one of keep, mask, soft"),
    (dict(rl=dict(curriculum="easy")), "rl.curriculum = 'easy': choose one of uniform, pass_rate"),
])
def test_values_that_cannot_work_are_refused(values, words) -> None:
    with pytest.raises(ConfigError, match="rl.filter = 'dynamic': chooses among prompts, but the"):
        order(prompts=1, filter="dynamic")
    with pytest.raises(ConfigError, match=words):
        Config(**values | {"rl": RLConfig(**values["rl"]), "data": DataConfig()})
