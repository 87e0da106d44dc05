"""What drafts gave lately, and for how long it is remembered."""

import jax.numpy as jnp
import pytest

from specrl_jax.control.harvest import BINS, Harvest, follow, unseen

DEPTH = 3


def drafted(harvest: Harvest, survival: float, rows: int, rounds: int = 1) -> Harvest:
    """Rounds in which each row drafts one node of each depth."""
    found = jnp.zeros((2, DEPTH, BINS)).at[:, :, 0].set(
        rows * jnp.asarray([[1.0], [survival]]))
    for _ in range(rounds):
        harvest = follow(harvest, found, jnp.float32(rows), jnp.int32(DEPTH),
                         jnp.float32(0), jnp.float32(0), jnp.int32(1))
    return harvest


def plain(harvest: Harvest, rounds: int) -> Harvest:
    return follow(harvest, jnp.zeros((2, DEPTH, BINS)), jnp.float32(1), jnp.int32(0),
                  jnp.float32(0), jnp.float32(0), jnp.int32(rounds))


def given(harvest: Harvest) -> list[float]:
    return harvest.mass.sum(1).tolist()


def test_of_one_row_a_whole_rollout_is_remembered_and_of_many_the_last_rounds() -> None:
    """Else a rollout of one row would begin as the text of the last one ended."""
    alone, many = (drafted(drafted(unseen(DEPTH), 0.9, rows, 40), 0.1, rows, 8)
                   for rows in (1, 16))
    assert given(alone) == pytest.approx(DEPTH * [(40 * 0.9 + 8 * 0.1) / 48])
    assert given(many) == pytest.approx(DEPTH * [0.1 + 0.8 * (7 / 8) ** 8])


def test_while_off_a_few_looks_tell_that_drafts_have_changed() -> None:
    harvest = drafted(unseen(DEPTH), 0.9, 1, 100)
    for _ in range(8):
        harvest = drafted(plain(harvest, 50), 0.1, 1)
    assert max(given(harvest)) < 0.45
