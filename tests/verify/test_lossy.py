"""Lossy rules do what they document; test_known_broken_rules.py shows that checks notice them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_checks import keys
from studies.lossy import lenient, typical

from specrl_jax.config import ConfigError
from specrl_jax.verify.protocol import Nodes
from specrl_jax.verify.rejection import Noise, walk

ROWS = 4000
P, Q = np.asarray([0.6, 0.2, 0.15, 0.05]), np.asarray([0.1, 0.5, 0.3, 0.1])
WALK = jax.jit(walk, static_argnums=4)
LENIENT = jax.jit(lenient, static_argnums=4, static_argnames="lenience")
TYPICAL = jax.jit(typical, static_argnums=4, static_argnames=("epsilon", "delta"))


def star(children: tuple[int, ...], p: np.ndarray = P) -> tuple[Any, ...]:
    """ROWS roots with these children; p at the root and after them, Q likewise."""
    tokens = np.tile(np.asarray([0, *children], np.int32), (ROWS, 1))
    rank = np.tile(np.arange(-1, len(children), dtype=np.int32), (ROWS, 1))
    logp, logq = (np.broadcast_to(np.log(x).astype(np.float32), (*tokens.shape, 4)) for x in (p, Q))
    nodes = Nodes(tokens=tokens, parent=tokens * 0, depth=np.minimum(rank + 1, 1), rank=rank,
                  live=tokens >= 0)
    noise = Noise(keys(ROWS, 0), np.arange(ROWS, dtype=np.int32))
    return (*jax.tree.map(jnp.asarray, (nodes, logp, logq, noise)), 1)


@pytest.mark.parametrize("lenience,chance", [(2.0, 0.8), (3.0, 1.0)])
def test_lenience_is_a_factor_of_the_chance(lenience: float, chance: float) -> None:
    _, _, count = LENIENT(*star((1,)), lenience=lenience)
    accepted = (np.asarray(count) == 2).mean()
    assert abs(accepted - chance) <= 5 * (chance * (1 - chance) / ROWS) ** 0.5


def test_lenience_of_one_is_the_lossless_rule() -> None:
    tree = star((1, 2))
    for one, other in zip(LENIENT(*tree, lenience=1.0), WALK(*tree), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("epsilon,delta,accepted", [
    # exp(-H(p)) is 0.346 here, so delta's threshold lies at 0.346 delta.
    (0.09, 1.0, 2), (1.0, 0.5, 1), (1.0, 1.0, None)])
def test_typical_takes_the_first_child_above_its_threshold(
        epsilon: float, delta: float, accepted: int | None) -> None:
    """Children are 3, 2, 1, which have p .05, .15, .2."""
    path, emitted, count = map(np.asarray, TYPICAL(*star((3, 2, 1)), epsilon=epsilon, delta=delta))
    if accepted is None:
        share = np.bincount(emitted[:, 0], minlength=4) / ROWS
        assert (count == 1).all() and np.abs(share - P).max() < 5 * (0.25 / ROWS) ** 0.5
    else:
        assert (count == 2).all() and (emitted[:, 0] == accepted).all()
        assert (path[:, 1] == {3: 1, 2: 2, 1: 3}[accepted]).all()


def test_typical_on_flat_distribution_accepts_more() -> None:
    flat = np.full(4, 0.25)
    assert (np.asarray(TYPICAL(*star((3,), flat))[2]) == 2).all()
    assert (np.asarray(TYPICAL(*star((3,)))[2]) == 1).all()


def test_thresholds_are_checked() -> None:
    with pytest.raises(ConfigError, match="lenience = 0.5: must be at least 1"):
        LENIENT(*star((1,)), lenience=0.5)
    with pytest.raises(ConfigError, match="epsilon = 0: must be above 0"):
        TYPICAL(*star((1,)), epsilon=0)
    with pytest.raises(ConfigError, match="delta = 2: must be above 0"):
        TYPICAL(*star((1,)), delta=2)
