"""Recording a round's tokens; tests/model/test_cache.py is about keys and values."""

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.structs import Frontier, Sequences, Verdict
from specrl_jax.verify.commit import record

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
