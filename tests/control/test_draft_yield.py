"""What drafts gave lately, and for how long it is remembered."""

import jax.numpy as jnp
import pytest

from specrl_jax.control.draft_yield import BINS, DraftYield, follow, unseen

DEPTH = 3


def drafted(yields: DraftYield, survival: float, rows: int, rounds: int = 1, steps: int = DEPTH
            ) -> DraftYield:
    """Rounds in which each row drafts one node of each depth."""
    found = jnp.zeros((2, DEPTH, BINS)).at[:, :steps, 0].set(
        rows * jnp.asarray([[1.0], [survival]]))
    for _ in range(rounds):
        yields = follow(yields, found, jnp.float32(rows), jnp.int32(steps),
                         jnp.float32(0), jnp.float32(0), jnp.int32(1))
    return yields


def plain(yields: DraftYield, rounds: int) -> DraftYield:
    return follow(yields, jnp.zeros((2, DEPTH, BINS)), jnp.float32(1), jnp.int32(0),
                  jnp.float32(0), jnp.float32(0), jnp.int32(rounds))


def given(yields: DraftYield) -> list[float]:
    return yields.mass.sum(1).tolist()


@pytest.mark.parametrize("rows, memory", [(1, 64), (4, 16), (16, 8)])
def test_follow_remembers_more_rounds_of_few_rows(rows: int, memory: int) -> None:
    """Else a rollout of one row would begin as the text of the last one ended."""
    yields = drafted(drafted(unseen(DEPTH), 0.9, rows, 100), 0.1, rows, 8)
    assert given(yields) == pytest.approx(DEPTH * [0.1 + 0.8 * (1 - 1 / memory) ** 8], rel=1e-4)


def test_follow_needs_few_drafts_after_a_pause() -> None:
    yields = drafted(unseen(DEPTH), 0.9, 1, 100)
    for _ in range(8):
        yields = drafted(plain(yields, 50), 0.1, 1)
    assert max(given(yields)) < 0.45


def test_follow_forgets_undrafted_depths_alike() -> None:
    one, many = (drafted(drafted(unseen(DEPTH), 0.9, rows, 100), 0.9, rows, 200, steps=1)
                 for rows in (1, 16))
    assert one.seen[1:].tolist() == pytest.approx(many.seen[1:].tolist())
    assert float(one.seen[0]) == 64 and float(many.seen[0]) == 8
