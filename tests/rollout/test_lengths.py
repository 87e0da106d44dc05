"""Expected lengths follow siblings, earlier responses and progress."""

import numpy as np

from specrl_jax.rollout.lengths import expected, of_past, weights

LIMIT = np.full(4, 100, np.int32)


def draft_prob(length: list[int], done: list[bool], past: np.ndarray | None = None) -> np.ndarray:
    return expected(LIMIT, np.asarray(length, np.int32), np.asarray(done), of_past(past, 2), 2)


def test_nothing_known_is_the_limit_and_what_ended_is_known() -> None:
    np.testing.assert_array_equal(draft_prob([0] * 4, [False] * 4), LIMIT)
    assert draft_prob([7, 3, 0, 0], [True, False, False, False])[0] == 7


def test_siblings_say_more_than_others() -> None:
    one = draft_prob([20, 3, 0, 0], [True, False, False, False])
    assert one[1] < one[2] < 100


def test_what_runs_on_is_compared_with_what_became_longer() -> None:
    short = draft_prob([20, 3, 0, 0], [True, False, False, False])[1]
    beyond = draft_prob([20, 40, 0, 0], [True, False, False, False])[1]
    assert short < 60 < beyond <= 100
    bounds = draft_prob([20, 99, 100, 0], [True, False, True, False])
    assert bounds[1] == 100 and (bounds >= [20, 100, 100, 1]).all()


def test_earlier_responses_count() -> None:
    past = np.full((2, 3, 50), -1, np.int32)
    past[0, :2, :10] = 1  # two responses of 10 tokens, one unknown
    past[1, :, :45] = 1
    found = draft_prob([0] * 4, [False] * 4, past)
    assert found[0] == found[1] < found[2] == found[3] < 100


def test_weights_are_those_of_each_shards_live_sequences():
    left = np.asarray([3, 1, 4, 1, 5, 9], np.float32)
    live = np.asarray([[True, False, True], [False, True, False]])
    found = weights(lambda tokens: tokens / tokens.sum(), left, live)
    np.testing.assert_allclose(found, [3 / 7, 1, 4 / 7, 1, 1, 1])
