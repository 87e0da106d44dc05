"""Noise: golden bits, and the law of what is made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specrl_kernels import noise

WORD = 2**32


def fmix32(h: int) -> int:
    """MurmurHash3's finaliser, on Python integers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor % WORD
    return h ^ h >> 16


def bits(key: tuple[int, int], position: int, index: int) -> int:
    """What noise.bits says of one element, on Python integers."""
    golden = 2654435761
    place = fmix32((position * golden + 0x2545F491) % WORD)
    first = fmix32(key[0] ^ place)
    second = fmix32((key[1] + first) % WORD)
    return fmix32(fmix32((index * golden + second) % WORD) ^ first)


def test_bits_equal_integer_arithmetic() -> None:
    keys = [(0, 0), (1, 0), (0, 1), (WORD - 1, WORD - 1), (123456789, 987654321)]
    positions, indices = [0, 1, 511, 2**31 - 1], [0, 1, 2, 49151, 2**31 - 1]
    got = noise.bits(jnp.asarray(keys, jnp.uint32)[:, None], jnp.asarray([positions] * len(keys)),
                     jnp.asarray(indices))
    assert got.dtype == jnp.uint32 and got.shape == (5, 4, 5)
    assert np.asarray(got).tolist() == [[[bits(k, p, i) for i in indices] for p in positions]
                                        for k in keys]


def test_golden_values() -> None:
    """Written down, so that no version and no backend changes what a seed means."""
    got = noise.bits(jnp.asarray([1, 2], jnp.uint32), jnp.int32(3), jnp.arange(4))
    assert np.asarray(got).tolist() == [3798603668, 1561657167, 3668019798, 691485796]


def gumbel_of(word: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Gumbel noise where the hash gives `word`."""
    monkeypatch.setattr(noise, "bits", lambda *args: jnp.full((1,), word, jnp.uint32))
    return float(noise.gumbel(jnp.zeros(2, jnp.uint32), jnp.int32(0), jnp.arange(1))[0])


@pytest.mark.parametrize("word", [0, 1, 2, 1000, 2**24, 2**31, WORD - 2**9, WORD - 2, WORD - 1])
def test_finite_and_right_at_both_ends(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    u = min((word + 0.5) / WORD, 1 - 2**-24)
    want = -np.log(-np.log1p(-u))
    assert np.isfinite(want)
    assert gumbel_of(word, monkeypatch) == pytest.approx(want, abs=1e-4)


def test_the_winning_end_is_finely_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [gumbel_of(word, monkeypatch) for word in range(20)]
    assert len(set(values)) == 20 and values == sorted(values, reverse=True)
    assert 22 < values[0] < 24


def test_no_key_singles_out_a_token() -> None:
    """Where a key's word equals an index's counter, nothing cancels."""
    golden, index = 2654435761, np.asarray([0, 1, 17, 49151])
    for word in index * golden % WORD:
        for key in ([word, 5], [5, word], [word, word], [0, word], [word, 0]):
            got = noise.bits(jnp.asarray(key, jnp.uint32), jnp.arange(200), jnp.asarray(index))
            assert len(np.unique(got)) > 795  # of 800


KEYS = np.random.default_rng(0).integers(0, WORD, (64, 2), dtype=np.uint32)


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    """f32[64 rows, 8 positions, 4096]."""
    position = jnp.broadcast_to(jnp.arange(8), (64, 8))
    return np.asarray(jax.jit(noise.gumbel)(KEYS[:, None], position, jnp.arange(4096)))


def test_moments(sample: np.ndarray) -> None:
    n = sample.size
    assert abs(sample.mean() - np.euler_gamma) < 5 * (np.pi / 6**0.5) / n**0.5
    assert abs(sample.var() - np.pi**2 / 6) < 5 * (4.4 * np.pi**4 / 36 / n) ** 0.5
    ordered = np.sort(sample, axis=None)
    distance = np.abs(np.exp(-np.exp(-ordered)) - (np.arange(n) + 0.5) / n).max()
    assert distance < 2.2 / n**0.5  # Kolmogorov and Smirnov's, at 1 in 10 000


def test_rows_positions_and_indices_are_independent(sample: np.ndarray) -> None:
    unit = (sample - sample.mean()) / sample.std()
    for axis in range(3):
        one, other = (np.take(unit, range(*span), axis) for span in (
            (0, unit.shape[axis] - 1), (1, unit.shape[axis])))
        assert abs((one * other).mean()) < 5 / one.size**0.5
    assert len(np.unique(sample[:, :, 0])) > 500  # of 512: no two rows or positions share noise
