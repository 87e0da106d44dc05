"""A controller's state as one array and back, on the host and on the device, bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import ADAPTIVE, controller, drive, priced

from specrl_jax.control.packed import WORD, Packing


@pytest.mark.parametrize("policy", [*ADAPTIVE, "fixed", "off"])
def test_a_state_comes_back_as_it_was(policy: str) -> None:
    control = controller(policy)
    blank, state = control.init(), control.init()
    if policy in ADAPTIVE:
        state, _ = drive(control, priced(state), [{"accept": 0.7}] * 5)
    state = jax.tree.map(np.asarray, state)
    packing = Packing(blank)
    words = packing.pack(state)
    assert words.dtype == WORD and words.shape == (packing.size,)
    there = jax.jit(lambda w: packing.pack(packing.unpack(w), jnp))(words)
    np.testing.assert_array_equal(there, words)
    for found in (packing.unpack(words), jax.jit(packing.unpack)(words)):
        assert jax.tree.structure(found) == jax.tree.structure(state)
        for before, after in zip(*map(jax.tree.leaves, (state, found)), strict=True):
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            assert np.asarray(after).tobytes() == before.tobytes()


@pytest.mark.parametrize("like, says", [
    ({"on": np.ones(3, bool)}, "bool"), ((np.float64(1), np.float32(1)), "float64")])
def test_what_has_not_four_bytes_is_refused(like: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Packing(like)


@pytest.mark.parametrize("other", [
    {"b": np.zeros((2, 3), np.float32)}, {"a": np.zeros((3, 2), np.float32)},
    {"a": np.zeros((2, 3), np.int32)}])
def test_another_state_is_refused(other: Any) -> None:
    with pytest.raises(ValueError):
        Packing({"a": np.zeros((2, 3), np.float32)}).pack(other)
