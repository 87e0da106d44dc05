"""Expected lengths follow siblings, earlier responses and progress."""

import numpy as np

from specrl_jax.rollout.host_view import expected_lengths

LIMIT = np.full(4, 100, np.int32)


def expected(length: list[int], done: list[bool], past: np.ndarray | None = None) -> np.ndarray:
    past = np.zeros((2, 0), np.int32) if past is None else past
    return expected_lengths(LIMIT, np.asarray(length, np.int32), np.asarray(done), past, 2)


def test_expected_lengths_trust_siblings_most() -> None:
    one = expected([20, 3, 0, 0], [True, False, False, False])
    assert one[1] < one[2] < 100


def test_expected_lengths_use_earlier_responses() -> None:
    past = np.asarray([[10, 10, 0], [45, 45, 45]])  # 0 is unknown
    actual = expected([0] * 4, [False] * 4, past)
    assert actual[0] == actual[1] < actual[2] == actual[3] < 100
