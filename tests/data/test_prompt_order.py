"""Which prompts a step uses, and which of their groups it learns from."""

import numpy as np
import pytest

from specrl_jax.config import Config, ConfigError, DataConfig, RLConfig, RolloutConfig
from specrl_jax.data.prompt_order import PromptOrder, chosen, step_prompts
from specrl_jax.rl import experience, overlong
from specrl_jax.rl.programs import blank_rollout


def order(prompts: int = 12, seed: int = 0, **rl) -> PromptOrder:
    return PromptOrder(Config(prompts_per_step=4, seed=seed, rl=RLConfig(**rl)), prompts)


def rewards(*means: float) -> np.ndarray:
    return np.repeat(np.float32(means)[:, None], 2, 1)


def test_uniform_order_is_that_of_epochs() -> None:
    for step in (0, 3, 7):
        np.testing.assert_array_equal(order().places(step, 4), step_prompts(12, 0, step, 4))
    assert order().arrays() == {}


def test_filter_goes_on_where_the_last_step_ended() -> None:
    moving, seen = order(filter="dynamic"), []
    for step, batches in enumerate((1, 3, 2)):
        places = moving.places(step, 4 * batches)
        np.testing.assert_array_equal(places[:4], moving.places(step, 4))
        moving.observe(places, rewards(*[0.0] * len(places)))
        seen += places.tolist()
    assert seen == order().places(0, 24).tolist()


@pytest.mark.parametrize("rl", [{"filter": "dynamic"}, {"curriculum": "pass_rate"}])
def test_order_resumes_from_its_arrays(rl) -> None:
    first, second = order(**rl), order(**rl)
    first.observe(first.places(0, 8), rewards(*np.linspace(-1, 2, 8)))
    second.restore(first.arrays()["prompts"])
    np.testing.assert_array_equal(first.places(1, 12), second.places(1, 12))
    assert first.places(1, 12).tolist() != order(**rl).places(1, 12).tolist()


def test_pass_rate_prefers_prompts_near_one_half() -> None:
    curriculum = order(curriculum="pass_rate")
    for _ in range(50):  # of 12 prompts the first four are solved half the time, others always
        curriculum.observe(np.arange(12), rewards(*[0.5] * 4, *[1.0] * 4, *[0.0] * 4))
    drawn = np.concatenate([curriculum.places(step, 4) for step in range(300)])
    counts = np.bincount(drawn, minlength=12)
    assert all(len(set(curriculum.places(step, 12))) == 12 for step in range(9))  # no repeats
    assert counts[:4].min() > 200 and 20 < counts[4:].min() and counts[4:].max() < 120
    other = order(seed=1, curriculum="pass_rate").places(0, 12)
    assert other.tolist() != order(curriculum="pass_rate").places(0, 12).tolist()


def test_filter_of_a_single_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="rl.filter = 'dynamic': chooses among prompts, but the"):
        order(prompts=1, filter="dynamic")


@pytest.mark.parametrize("useful, groups", [
    ([0, 1, 1, 0, 1, 1], [1, 2, 4]), ([1, 0, 0, 0, 0, 1], [0, 1, 5]), ([0] * 6, [0, 1, 2])])
def test_first_useful_groups_are_chosen(useful: list[int], groups: list[int]) -> None:
    advantage = np.float32([[x, -x] for x in useful])
    np.testing.assert_array_equal(chosen(advantage, 3), groups)


def scored(ids: list[int], advantage: list[float]) -> experience.Scored:
    """Groups of two in the order of their ids, as rollouts have them."""
    rollout = blank_rollout(CONFIG).replace(
        prompt_id=np.repeat(np.int32(ids), 2), occurrence=np.zeros(4, np.int32),
        sample_id=np.int32([0, 1, 0, 1]))
    values = np.repeat(np.float32(advantage), 2)
    return experience.Scored(rollout, [{}] * 4, [], values, values, None,
                             {"reward/failures": 0}, values)


def test_groups_fill_the_batch_in_the_order_of_draws() -> None:
    drawn = [(5, 0), (1, 0), (3, 0), (0, 0)]
    found, metrics = experience.merge([scored([1, 5], [0, 1]), scored([0, 3], [1, 1])], CONFIG,
                                      drawn)
    assert found.rollout.prompt_id.tolist() == [3, 3, 5, 5]  # not 0, which was drawn after 3
    assert metrics["reward/nonzero_advantage_fraction"] == 0.75


CONFIG = Config(prompts_per_step=2, group_size=2, rl=RLConfig(overlong="soft"),
                rollout=RolloutConfig(max_new_tokens=20))


def test_soft_penalty_by_hand() -> None:
    # Free up to 16 of 20 tokens, then 1/4 a token.
    rollout = blank_rollout(CONFIG).replace(length=np.int32([16, 17, 20, 1]))
    np.testing.assert_allclose(overlong.penalty(CONFIG, rollout), [0, -0.25, -1, 0])


def test_masked_responses_have_no_tokens_and_no_advantage() -> None:
    config = Config(rl=RLConfig(overlong="mask"))
    rollout = blank_rollout(CONFIG).replace(length=np.int32([6, 10, 10, 1]),
                                            stopped=np.array([True, False, True, True]))
    counted, advantage = overlong.counted(config, rollout, np.float32([1, 2, 3, 4]))
    np.testing.assert_array_equal(counted.length, [6, 0, 10, 1])
    np.testing.assert_array_equal(advantage, [1, 0, 3, 4])
    assert not overlong.penalty(config, rollout).any()


@pytest.mark.parametrize("values, words", [
    (dict(prompts_per_step=1, rl=dict(filter="dynamic")), "prompts_per_step = 1: rl.filter = dyn"),
    (dict(rl=dict(filter="all")), "rl.filter = 'all': choose one of none, dynamic"),
    (dict(rl=dict(filter="dynamic", advantage="batch")), "rl.filter = 'dynamic': rl.advantage = b"),
    (dict(rl=dict(overlong="cut")), "rl.overlong = 'cut': choose one of keep, mask, soft"),
    (dict(rl=dict(curriculum="easy")), "rl.curriculum = 'easy': choose one of uniform, pass_rate"),
])
def test_values_that_cannot_work_are_refused(values, words) -> None:
    with pytest.raises(ConfigError, match=words):
        Config(**values | {"rl": RLConfig(**values["rl"]), "data": DataConfig()})


def test_filter_is_refused_with_a_teacher() -> None:
    with pytest.raises(ConfigError, match="rl.filter = 'dynamic': a teacher tells more"):
        RLConfig(filter="dynamic", teacher="random:tiny")
