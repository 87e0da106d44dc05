"""Norms of few tokens: right, and a token's bits do not depend on the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tolerances import TOLERANCE
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.rms_norm import IMPLEMENTATIONS, rms_norm

EPS = 1e-5
CALL = jax.jit(functools.partial(rms_norm, eps=EPS), static_argnames="implementation")


def arrays(features, tokens):
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.standard_normal((features, tokens)) * 3, jnp.float32),
            jnp.asarray(rng.standard_normal(features), jnp.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", [16, 96, 576])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_equals_float64(implementation, features, tokens):
    x, weight = arrays(features, tokens)
    x = x.at[:, 0].multiply(1e-3)  # eps counts
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt((wide**2).mean(0) + EPS) * np.asarray(weight, np.float64)[:, None]
    np.testing.assert_allclose(CALL(x, weight, implementation=implementation), want,
                               rtol=TOLERANCE["rms_norm", "float32"])


@pytest.mark.parametrize("features", [16, 96, 576])
def test_bits_of_a_token_do_not_depend_on_others(features):
    x, weight = arrays(features, 300)
    want = np.asarray(CALL(x, weight, implementation="machine"))
    for tokens in (1, 2, 7, 16, 33, 64):
        got = CALL(x[:, 100:100 + tokens], weight, implementation="machine")
        assert np.array_equal(got, want[:, 100:100 + tokens])


def test_unsupported_call_is_refused_and_left_to_xla():
    x, weight = arrays(24, 3)
    with pytest.raises(Unsupported, match="F = 24"):
        rms_norm(x, weight, eps=EPS, implementation="machine")
    assert np.array_equal(CALL(x, weight), CALL(x, weight, implementation="xla"))
    with pytest.raises(ValueError, match="x, weight = "):
        rms_norm(x, weight[:3], eps=EPS)
