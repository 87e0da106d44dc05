"""What drafts gave lately, and for how long it is remembered."""

import jax.numpy as jnp
import pytest

from specrl_jax.control.harvest import BINS, Harvest, follow, unseen

DEPTH = 3


def drafted(harvest: Harvest, survival: float, rows: int, rounds: int = 1, steps: int = DEPTH
            ) -> Harvest:
    """Rounds in which each row drafts one node of each depth."""
    found = jnp.zeros((2, DEPTH, BINS)).at[:, :steps, 0].set(
        rows * jnp.asarray([[1.0], [survival]]))
    for _ in range(rounds):
        harvest = follow(harvest, found, jnp.float32(rows), jnp.int32(steps),
                         jnp.float32(0), jnp.float32(0), jnp.int32(1))
    return harvest


def plain(harvest: Harvest, rounds: int) -> Harvest:
    return follow(harvest, jnp.zeros((2, DEPTH, BINS)), jnp.float32(1), jnp.int32(0),
                  jnp.float32(0), jnp.float32(0), jnp.int32(rounds))


def given(harvest: Harvest) -> list[float]:
    return harvest.mass.sum(1).tolist()


@pytest.mark.parametrize("rows, memory", [(1, 64), (4, 16), (16, 8)])
def test_of_few_rows_more_rounds_are_remembered(rows: int, memory: int) -> None:
    """Else a rollout of one row would begin as the text of the last one ended."""
    harvest = drafted(drafted(unseen(DEPTH), 0.9, rows, 100), 0.1, rows, 8)
    assert given(harvest) == pytest.approx(DEPTH * [0.1 + 0.8 * (1 - 1 / memory) ** 8], rel=1e-4)


def test_while_off_a_few_looks_tell_that_drafts_have_changed() -> None:
    harvest = drafted(unseen(DEPTH), 0.9, 1, 100)
    for _ in range(8):
        harvest = drafted(plain(harvest, 50), 0.1, 1)
    assert max(given(harvest)) < 0.45


def test_a_depth_no_longer_drafted_is_forgotten_alike_for_any_rows() -> None:
    one, many = (drafted(drafted(unseen(DEPTH), 0.9, rows, 100), 0.9, rows, 200, steps=1)
                 for rows in (1, 16))
    assert one.seen[1:].tolist() == pytest.approx(many.seen[1:].tolist())
    assert float(one.seen[0]) == 64 and float(many.seen[0]) == 8
