"""Attention in chunks of queries equals that over whole rows, and holds no whole scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.model import attention
from specrl_jax.model.flash import flash_attention

G, R, E, B, T = 2, 3, 4, 2, 21


def inputs():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((*shape, B, T)), jnp.float32)
               for shape in ((G, R, E), (G, E), (G, E)))
    segment = np.repeat([[0, 1, 2, -1], [0, 1, 2, 3]], [4, 6, 7, 4], 1).astype(np.int32)
    prefix = np.where(segment == 2, 1, segment)  # continues segment 1
    position = np.concatenate([np.arange(4), np.arange(6), 6 + np.arange(7), np.arange(4)])
    return (q, k, v), (np.tile(position, (B, 1)).astype(np.int32), segment, prefix)


def by_hand(q, k, v, position, segment, prefix):
    out = np.zeros(q.shape)
    for b, t in np.ndindex(B, T):
        seen = (segment[b] == segment[b, t]) | (segment[b] == prefix[b, t])
        seen &= position[b] <= position[b, t]
        score = np.einsum("gre,ges->grs", q[..., b, t], k[:, :, b, seen]) / E**0.5
        weight = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
        out[..., b, t] = np.einsum("grs,ges->gre", weight, v[:, :, b, seen])
    return out


@pytest.mark.parametrize("size", [5, 21])
def test_attention_equals_that_token_by_token(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", size)
    arrays, positions = inputs()
    actual = attention.segment_attention(*positions)(0, *arrays)
    np.testing.assert_allclose(actual, by_hand(*map(np.asarray, arrays), *positions), atol=1e-5)
    alone = attention.segment_attention(*positions[:2])(0, *arrays)
    np.testing.assert_allclose(
        alone, by_hand(*map(np.asarray, arrays), *positions[:2], positions[1]), atol=1e-5)


def test_attention_in_chunks_has_the_gradients_of_whole_rows(
        monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, positions = inputs()

    def gradients(size: int):
        monkeypatch.setattr(attention, "QUERIES_AT_ONCE", size)

        def loss(*arrays):
            out = attention.segment_attention(*positions)(0, *arrays)
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

        assert (f"[{B},{G},{R},{T},{T}]" in str(jax.make_jaxpr(jax.grad(loss))(*arrays))) == (
            size == T)
        return jax.grad(loss, (0, 1, 2))(*arrays)

    for a, b in zip(gradients(4), gradients(T), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_kernel_of_a_platform_equals_chunks(platform: str) -> None:
    """Values and gradients of real tokens; rows are padded to whole blocks."""
    rng, total = np.random.default_rng(0), 200
    q, k, v = (jnp.asarray(rng.standard_normal((*shape, 64, 2, total)), jnp.float32)
               for shape in ((2, 2), (2,), (2,)))
    segment = np.repeat([[0, 1, -1, -1], [3, 0, 1, 2]], 50, 1).astype(np.int32)
    position = np.tile(np.arange(total, dtype=np.int32), (2, 1))
    weight = rng.standard_normal(q.shape) * (segment >= 0)

    def outcome(attend):
        return jax.value_and_grad(lambda *args: (attend(0, *args) * weight).sum(), (0, 1, 2))(
            q, k, v)

    actual = outcome(flash_attention(platform, jnp.asarray(segment), interpret=True))
    want = outcome(attention.segment_attention(position, segment))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)
