"""What bench_numerics counts as different."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.bench.numerics import BITS, same_bits, same_tokens


def said(*rows: list[int]) -> Any:
    """Sequences whose log-probabilities follow from their tokens; behind the end is garbage."""
    length = np.asarray([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), 6), 77, np.int32)
    for row, mine in zip(rows, tokens, strict=True):
        mine[: len(row)] = row
    bits = {name: -(tokens + 1).astype(np.float32) / 7 for name in BITS}
    return SimpleNamespace(tokens=tokens, length=length, **bits)


def test_equal_rollouts() -> None:
    one, other = said([1, 2, 3], [4]), said([1, 2, 3], [4])
    other.tokens[1, 2] = other.logprob[1, 2] = 5  # nobody said it
    assert same_bits(one, other)
    count, equal = same_tokens(one, other)
    assert count == 4 and equal.all()


@pytest.mark.parametrize("name", BITS)
def test_a_bit_is_enough(name: str) -> None:
    one, other = said([1, 2, 3]), said([1, 2, 3])
    getattr(other, name)[0, 1] = np.nextafter(getattr(other, name)[0, 1], np.float32(0))
    assert not same_bits(one, other) and same_tokens(one, other)[1].all()


def test_tokens_count_up_to_the_first_that_differs() -> None:
    count, equal = same_tokens(said([1, 2, 3, 4], [5, 6]), said([1, 2, 9, 4], [5, 6]))
    assert count == 2 + 2 and equal.tolist() == [False, True]
    count, equal = same_tokens(said([1, 2, 3]), said([1, 2]))
    assert count == 2 and not equal.any()
    assert not same_bits(said([1, 2, 3]), said([1, 2]))
