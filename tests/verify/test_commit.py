"""Committing writes the accepted path and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.structs import Cache, Frontier, Path, Sequences, Verdict
from specrl_jax.verify.commit import append, record, write_by_loop, write_by_scatter

B, G, E, S, D, LAYERS = 3, 2, 4, 12, 3, 2
SEGMENTS = [(12,), (6, 6), (1, 4, 3, 4), (5, 2, 5)]


def parts(seed: int = 0) -> tuple[Cache, Path]:
    rng = np.random.default_rng(seed)

    def pair(width: int) -> tuple[Any, Any]:
        return (jnp.asarray(rng.normal(size=(B, G, E, width)), jnp.float32),
                jnp.asarray(rng.normal(size=(B, G, width, E)), jnp.float32))

    cache = Cache(kv=[pair(S) for _ in range(LAYERS)], length=jnp.asarray([0, 5, S - D]))
    kv = jnp.asarray(rng.normal(size=(D + 1, LAYERS, 2, G, E, B)), jnp.float32)
    path = Path(kv=kv, taps=None, draw=jnp.zeros((B, 1), jnp.int32),
                verified=jnp.ones((B, 1), bool))
    return cache, path


def split(cache: Cache, sizes: tuple[int, ...]) -> Cache:
    """The cache in segments."""
    cut = np.cumsum(sizes)[:-1]
    return cache.replace(kv=[([*jnp.split(k, cut, 3)], [*jnp.split(v, cut, 2)])
                             for k, v in cache.kv])


WRITERS = (write_by_loop, write_by_scatter)  # of CPUs and GPUs; both run anywhere


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("sizes", SEGMENTS)
@pytest.mark.parametrize("count", [(0, 0, 0), (1, 1, 1), (4, 0, 2), (2, 3, 4)])
def test_writer_writes_exactly_count_columns(
        count: tuple[int, ...], sizes: tuple[int, ...], writer: Any) -> None:
    cache, path = parts()
    got = jax.jit(writer)(split(cache, sizes).kv, path.kv, cache.length, jnp.asarray(count))
    new = np.asarray(path.kv)
    for layer, ((k, v), (old_k, old_v)) in enumerate(zip(got, cache.kv, strict=True)):
        want_k, want_v = np.array(old_k), np.array(old_v)
        for b in range(B):
            at = int(cache.length[b])
            n = min(count[b], S - at)  # what does not fit is dropped
            want_k[b, :, :, at : at + n] = np.moveaxis(new[:n, layer, 0, ..., b], 0, 2)
            want_v[b, :, at : at + n] = np.moveaxis(new[:n, layer, 1, ..., b], 0, 1)
        np.testing.assert_array_equal(np.concatenate(k, 3), want_k)
        np.testing.assert_array_equal(np.concatenate(v, 2), want_v)


@pytest.mark.parametrize("platform, loops", [("cpu", True), ("cuda", False), ("tpu", True)])
def test_append_on_a_gpu_has_no_loop(platform: str, loops: bool) -> None:
    """Where places might meet, deterministic operations would make a loop of a scatter."""
    cache, path = parts()
    text = jax.jit(append).trace(split(cache, (6, 6)), path, jnp.zeros(B, jnp.int32)).lower(
        lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in text) == loops
    scatters = 0 if loops else 4 * LAYERS
    assert text.count('"stablehlo.scatter"(') == text.count("unique_indices = true") == scatters


def test_append_writes_and_counts() -> None:
    cache, path = parts()
    cache, count = split(cache, (6, 6)), jnp.asarray([4, 0, 2])
    got = jax.jit(append)(cache, path, count)
    assert np.asarray(got.length).tolist() == (np.asarray(cache.length) + count).tolist()
    want = write_by_loop(cache.kv, path.kv, cache.length, count)
    jax.tree.map(np.testing.assert_array_equal, got.kv, want)


@pytest.mark.parametrize("writer", WRITERS)
def test_path_beyond_count_is_inert(writer: Any) -> None:
    cache, path = parts()
    count = jnp.asarray([2, 0, 4])
    keep = np.arange(D + 1)[None] < np.asarray(count)[:, None]
    dirty = path.replace(kv=jnp.where(keep.T[:, None, None, None, None], path.kv, jnp.nan))
    cache = split(cache, (6, 6))
    clean, other = (writer(cache.kv, p.kv, cache.length, count) for p in (path, dirty))
    jax.tree.map(np.testing.assert_array_equal, clean, other)


Q, T = 4, 6


def blank() -> Sequences:
    grid, row = jnp.zeros((Q, T), jnp.int32), jnp.zeros(Q, jnp.int32)
    real = jnp.zeros((Q, T))
    return Sequences(tokens=grid, logprob=real, raw_logprob=real, top_p_mass=real, commits=grid,
                     length=row, rounds=row, done=row > 0)


def verdict_of(seq: list[int], generated: list[int], live: list[bool], tokens: list[list[int]],
         count: list[int], stopped: list[bool]) -> tuple[Verdict, Frontier]:
    said, row = jnp.asarray(tokens), jnp.asarray(seq)
    verdict = Verdict(tokens=said, logprob=-said / 8, raw_logprob=-said / 4, top_p_mass=said / 100,
                      path=said * 0, count=jnp.asarray(count), stopped=jnp.asarray(stopped))
    return verdict, Frontier(root=row, seq=row, generated=jnp.asarray(generated), context=row,
                        live=jnp.asarray(live))


def test_record_accounts_for_every_round() -> None:
    sequences = record(blank(), *verdict_of(
        [2, 0], [0, 0], [True, True], [[1, 2, 3], [4, 5, 6]], [2, 1], [False, False]))
    sequences = record(sequences, *verdict_of(
        [2, 0], [2, 1], [True, True], [[7, 8, 9], [10, 11, 12]], [3, 2], [True, False]))
    assert np.asarray(sequences.tokens).tolist() == [
        [4, 10, 11, 0, 0, 0], [0] * 6, [1, 2, 7, 8, 9, 0], [0] * 6]
    np.testing.assert_allclose(sequences.logprob, -np.asarray(sequences.tokens) / 8)
    np.testing.assert_allclose(sequences.raw_logprob, -np.asarray(sequences.tokens) / 4)
    np.testing.assert_allclose(sequences.top_p_mass, np.asarray(sequences.tokens) / 100)
    assert np.asarray(sequences.length).tolist() == [3, 0, 5, 0]
    assert np.asarray(sequences.rounds).tolist() == [2, 0, 2, 0]
    assert np.asarray(sequences.commits)[:, :3].tolist() == [
        [1, 2, 0], [0, 0, 0], [2, 3, 0], [0, 0, 0]]
    assert np.asarray(sequences.done).tolist() == [False, False, True, False]


def test_dead_and_empty_rows_leave_no_trace() -> None:
    before = record(blank(), *verdict_of([1], [0], [True], [[1, 2]], [2], [True]))
    after = record(before, *verdict_of([1, Q], [2, 0], [False, False], [[3, 4], [5, 6]], [0, 0],
                                 [False, False]))
    jax.tree.map(np.testing.assert_array_equal, before, after)
