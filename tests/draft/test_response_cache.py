"""The ring of earlier responses."""

import numpy as np
import pytest

from specrl_jax.data.prompt_order import step_prompts
from specrl_jax.draft.response_cache import ResponseCache, add, blank, capacity, past


def with_rows(cache: ResponseCache, *rows: tuple[int, list[int]], per_prompt: int = 9
              ) -> ResponseCache:
    tokens = np.zeros((len(rows), cache.tokens.shape[1]), np.int32)
    for i, (_, said) in enumerate(rows):
        tokens[i, : len(said)] = said
    return add(cache, np.asarray([p for p, _ in rows]), tokens,
               np.asarray([len(s) for _, s in rows]), per_prompt)


def first_tokens(cache: ResponseCache, prompts: list[int], count: int) -> list:
    return past(cache, np.asarray(prompts), count)[..., 0].tolist()


def test_past_is_the_prompts_own_newest_first() -> None:
    before = with_rows(blank(10, 3), (7, [1, 2]), (8, [3]), (7, [4, 5, 6]), per_prompt=2)
    cache = with_rows(before, (7, [9]))
    assert past(cache, np.asarray([7, 8, 9]), 2).tolist() == [
        [[9, -1, -1], [4, 5, 6]], [[3, -1, -1], [-1, -1, -1]], [[-1, -1, -1], [-1, -1, -1]]]
    assert first_tokens(before, [7], 2) == [[4, 1]]  # a value: adding changes no other


def test_add_overwrites_the_oldest() -> None:
    cache = blank(3, 2)
    for i in range(8):
        cache = with_rows(cache, (i % 2, [i, i]))
    assert first_tokens(cache, [0, 1], 3) == [[6, -1, -1], [7, 5, -1]]


def test_add_keeps_the_last_of_each_prompt() -> None:
    cache = with_rows(blank(4, 1), (0, [1]), (0, [2]), (1, [3]), (0, [4]), (1, [5]), (1, [6]),
                      per_prompt=2)
    assert first_tokens(cache, [0, 1], 3) == [[4, 2, -1], [6, 5, -1]]


@pytest.mark.parametrize("group", [2, 4, 32])
def test_prompt_of_the_next_epoch_finds_its_past(group: int) -> None:
    examples, most = 16, 4
    cache = blank(capacity(2, examples, most), 2)
    seen: set[int] = set()
    for step in range(12):
        ids = step_prompts(examples, 0, step, 4)
        known = (past(cache, ids, min(group, most)) >= 0).all((1, 2))
        np.testing.assert_array_equal(known, [i in seen for i in ids.tolist()])
        seen |= set(ids.tolist())
        rows = np.repeat(ids, group)
        cache = add(cache, rows, np.ones((len(rows), 2), np.int32), np.full(len(rows), 2), most)
