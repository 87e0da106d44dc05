"""bench_draw times draws that say the same tokens."""

import numpy as np
import pytest

from experiments.bench import draw
from specrl_jax.verify import sampling


def test_a_shape_is_measured() -> None:
    case = draw.measure(draw.Shape("siblings", 4, 3), 512, 2)
    assert case["seconds"].keys() == {"draw", "noise kept for siblings", "no noise",
                                      *draw.TRUNCATIONS,
                                      *(f"{name}, peaked" for name in draw.TRUNCATIONS)}
    assert all(len(one["values"]) == 2 and one["min"] > 0 for one in case["seconds"].values())
    assert case["over draw"].keys() == case["seconds"].keys() - {"draw"}


def test_kept_noise_of_other_pairs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = draw.with_noise
    monkeypatch.setattr(draw, "with_noise", lambda pair, *args: right(
        None if pair is None else np.zeros_like(pair), *args))
    with pytest.raises(AssertionError, match="drew other tokens"):
        draw.measure(draw.Shape("siblings", 8, 8), 512, 1)


def test_without_noise_the_best_token_is_drawn() -> None:
    logits = np.random.default_rng(0).normal(size=(512, 3)).astype(np.float32)
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.int32)
    found = draw.with_noise(None, logits, ones, zeros, ones, np.zeros((3, 2), np.uint32), zeros)
    assert isinstance(found, sampling.Draw)
    np.testing.assert_array_equal(found.token, logits.argmax(0))
