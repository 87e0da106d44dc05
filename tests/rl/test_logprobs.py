"""Scores in chunks against those of whole logits: values, gradients, dtype, what is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.rl.logprobs import token_logprobs

V, F, N = 50, 8, 21


def inputs(dtype: type = jnp.float32) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    head, hidden = (rng.standard_normal(shape).astype(np.float32) for shape in ((V, F), (F, N)))
    return (jnp.asarray(head), jnp.asarray(hidden, dtype), jnp.asarray(rng.integers(0, V, N)),
            jnp.asarray(rng.uniform(0.5, 2, N), jnp.float32))


def whole(head, hidden, tokens, temperature):
    logits = head.astype(hidden.dtype).astype(jnp.float32) @ hidden.astype(jnp.float32)
    logp = jax.nn.log_softmax(logits / temperature[None], axis=0)
    return logp[tokens, jnp.arange(N)], -(jnp.exp(logp) * logp).sum(0)


def objective(scores, weight):
    return lambda head, hidden, *rest: sum(
        (w * part).sum() for w, part in zip(weight, scores(head, hidden, *rest), strict=True))


@pytest.mark.parametrize("chunk", [1, 8, 21, 64])
def test_scores_and_gradients_equal_those_of_whole_logits(chunk: int) -> None:
    def chunked(*args):
        return token_logprobs(*args, jnp.int32(N), chunk=chunk)

    args, weight = inputs(), np.random.default_rng(1).standard_normal((2, N))
    for actual, want in zip(chunked(*args), whole(*args), strict=True):
        np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-5)
    actual, want = (jax.grad(objective(scores, weight), (0, 1))(*args)
                    for scores in (chunked, whole))
    for a, b in zip(actual, want, strict=True):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)


def test_scores_beyond_the_count_are_zero_without_gradient() -> None:
    args = inputs()

    def total(head, hidden):
        return sum(part.sum() for part in token_logprobs(head, hidden, *args[2:], jnp.int32(9), 4))

    logprob, entropy = token_logprobs(*args, jnp.int32(9), 4)
    assert (logprob[:12] < 0).all() and (entropy[:12] > 0).all()
    assert not logprob[12:].any() and not entropy[12:].any()
    by_hidden = jax.grad(total, 1)(*args[:2])
    assert by_hidden[:, :12].any(0).all() and not by_hidden[:, 12:].any()


def test_scores_and_gradients_hold_no_whole_logits() -> None:
    head, hidden, tokens, temperature = inputs()

    def gradient(head, hidden):
        return jax.grad(lambda *args: token_logprobs(
            *args, tokens, temperature, jnp.int32(N), 4)[0].sum(), (0, 1))(head, hidden)

    text = str(jax.make_jaxpr(gradient)(head, hidden))
    assert f"f32[{V},4]" in text and f"[{V},{N}]" not in text and f"[{V},24]" not in text
