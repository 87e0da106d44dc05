"""The ring of earlier responses."""

import numpy as np
import pytest

from specrl_jax.data.prompt_order import step_prompts
from specrl_jax.draft.response_cache import ResponseCache, capacity


def add(memory: ResponseCache, *rows: tuple[int, list[int]], step: int = 0) -> None:
    tokens = np.zeros((len(rows), memory.tokens.shape[1]), np.int32)
    for i, (_, said) in enumerate(rows):
        tokens[i, : len(said)] = said
    memory.add(np.asarray([p for p, _ in rows]), tokens, np.asarray([len(s) for _, s in rows]),
               step)


def test_past_is_the_prompts_own_newest_first() -> None:
    memory = ResponseCache(10, 3, per_prompt=2)
    add(memory, (7, [1, 2]), (8, [3]), (7, [4, 5, 6]))
    add(memory, (7, [9]))
    assert memory.past(np.asarray([7, 8, 9]), 2, 1).tolist() == [
        [[9, -1, -1], [4, 5, 6]], [[3, -1, -1], [-1, -1, -1]], [[-1, -1, -1], [-1, -1, -1]]]


def test_add_overwrites_the_oldest() -> None:
    memory = ResponseCache(3, 2, per_prompt=9)
    for i in range(8):
        add(memory, (i % 2, [i, i]))
    assert memory.past(np.asarray([0, 1]), 3, 1)[..., 0].tolist() == [[6, -1, -1], [7, 5, -1]]


def test_window_counts_steps_and_outlives_a_restart() -> None:
    memory, prompt = ResponseCache(9, 1, per_prompt=9, window=2), np.asarray([0])
    for step in range(5):
        add(memory, (0, [step]), (1, [9]), step=step)
    again = ResponseCache(9, 1, per_prompt=9, window=2)
    again.restore({name: array.copy() for name, array in memory.arrays().items()})
    for one in (memory, again):
        for step, newest in ((5, [4, 3, -1]), (6, [4, -1, -1]), (7, [-1, -1, -1])):
            assert one.past(prompt, 3, step)[0, :, 0].tolist() == newest
    assert ResponseCache(9, 1, per_prompt=9).window == 0  # without end, as the tests above


def test_add_keeps_the_last_of_each_prompt() -> None:
    memory = ResponseCache(4, 1, per_prompt=2)
    add(memory, (0, [1]), (0, [2]), (1, [3]), (0, [4]), (1, [5]), (1, [6]))
    assert memory.past(np.asarray([0, 1]), 3, 1)[..., 0].tolist() == [[4, 2, -1], [6, 5, -1]]


def test_more_than_fit_at_once_leaves_the_last_ones() -> None:
    memory = ResponseCache(2, 1, per_prompt=9)
    add(memory, *[(0, [i]) for i in range(5)])
    assert memory.past(np.asarray([0]), 4, 1)[0, :, 0].tolist() == [4, 3, -1, -1]


def test_capacity_keeps_the_byte_bound() -> None:
    assert capacity(1, 62, 10**9, 8) == 2**20 // 256
    assert capacity(64, 16, 10, 8) == 160
    assert capacity(0, 16, 10, 8) == 1


@pytest.mark.parametrize("group", [2, 4, 32])
def test_prompt_of_the_next_epoch_finds_its_past(group: int) -> None:
    examples, past = 16, 4
    memory = ResponseCache(capacity(64, 2, examples, past), 2, per_prompt=past)
    seen: set[int] = set()
    for step in range(12):
        ids = step_prompts(examples, 0, step, 4)
        found = (memory.past(ids, min(group, past), step) >= 0).all((1, 2))
        np.testing.assert_array_equal(found, [i in seen for i in ids.tolist()])
        seen |= set(ids.tolist())
        rows = np.repeat(ids, group)
        memory.add(rows, np.ones((len(rows), 2), np.int32), np.full(len(rows), 2), step)
