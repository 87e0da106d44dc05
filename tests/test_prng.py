"""A sequence's noise key is a function of its six indices, and of nothing else."""

import itertools

import numpy as np
import pytest

from specrl_jax import prng

# seed, stream, step, prompt_id, occurrence, sample_id: two values of each
VALUES = ((0, 7), ("train", "eval"), (0, 3), (5, 1_000_000), (0, 1), (0, 1))


def key(seed: int, stream: str, step: int, *of_row: int) -> tuple[int, ...]:
    keys = prng.row_keys(seed, stream, step, *(np.asarray([x], np.int32) for x in of_row))
    assert keys.shape == (1, 2) and keys.dtype == np.uint32
    return tuple(keys[0].tolist())


def test_every_index_counts_and_no_two_can_be_swapped() -> None:
    chosen = list(itertools.product(*VALUES))
    assert len({key(*indices) for indices in chosen}) == len(chosen) == 64
    assert len({key(1, "train", 1, *order) for order in itertools.permutations((1, 2, 3))}) == 6
    assert len({key(0, stream, 0, 0, 0, 0) for stream in prng.STREAMS}) == len(prng.STREAMS)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_key_does_not_depend_on_other_rows(order: list[int]) -> None:
    rows = np.asarray([[5, 0, 0], [5, 0, 1], [5, 1, 0], [9, 0, 0]], np.int32)[order]
    together = prng.row_keys(3, "train", 2, *rows.T)
    assert [tuple(k) for k in together.tolist()] == [key(3, "train", 2, *row) for row in rows]
