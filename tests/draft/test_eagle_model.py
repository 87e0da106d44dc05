"""The EAGLE-3 network against a plain NumPy one that drafts from every position."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_arch, tiny_params

from specrl_jax.config import ConfigError
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch, choose_vocab, initialize
from specrl_jax.model import transformer

ACTOR = tiny_arch(vocab_size=20, hidden_size=8, num_layers=4, rope_theta=100.0)
ARCH = EagleArch(ACTOR, draft_vocab=12)
EAGLE_3 = dataclasses.replace(ARCH, tap_norm=False, state_norm=False)
KINDS = pytest.mark.parametrize("arch", [ARCH, EAGLE_3], ids=["3.1", "3"])
T, STEPS = 7, 4
UNROLL = jax.jit(functools.partial(eagle_model.unroll, ARCH, steps=STEPS))


def weights(arch: EagleArch = ARCH, seed: int = 0) -> dict[str, Any]:
    """Random, large enough for attention to matter."""
    return jax.tree.map(lambda a: jnp.asarray(a * (1 if a.ndim == 1 else 8)),
                        initialize(arch, seed))


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"embed": tiny_params(ACTOR)["embed"],
            "features": jnp.asarray(rng.standard_normal((8, 2, T)), jnp.float32),
            "tokens": jnp.asarray(rng.integers(0, 20, (2, T))), "length": jnp.asarray([T, 5]),
            "anchors": jnp.tile(jnp.arange(T), (2, 1))}


class Plain:
    """One sequence, token-major, in float64: a causal layer over whatever inputs it is given."""

    def __init__(self, arch: EagleArch, params: dict[str, Any]) -> None:
        self.arch = arch
        self.p = {name: np.asarray(a, np.float64) for name, a in params.items()}

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.arch.actor.norm_eps) * self.p[name]

    def turn(self, x: np.ndarray) -> np.ndarray:
        """Rotates x [T, heads, E] by its place."""
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None] / self.arch.actor.rope_theta ** (np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([x[..., :half] * cos - x[..., half:] * sin,
                               x[..., half:] * cos + x[..., :half] * sin], -1)

    def outputs(self, embedded: np.ndarray, feature: np.ndarray) -> np.ndarray:
        x = np.concatenate([self.norm(embedded, "embed_norm"), self.norm(feature, "feature_norm")],
                           -1)
        g, wide, e, _ = self.p["qkv"].shape
        out = np.zeros_like(feature)
        for head in range(g):
            qkv = np.einsum("rei,ti->tre", self.p["qkv"][head], x)
            k, v = self.turn(qkv[:, wide - 2 : wide - 1])[:, 0], qkv[:, wide - 1]
            for r in range(wide - 2):
                score = self.turn(qkv[:, r : r + 1])[:, 0] @ k.T / np.sqrt(e)
                score[np.triu_indices(len(x), 1)] = -np.inf
                weight = np.exp(score - score.max(-1, keepdims=True))
                weight /= weight.sum(-1, keepdims=True)
                out += weight @ v @ self.p["o"][:, head, r].T
        x = feature + out
        gate, up = np.einsum("jif,tf->jti", self.p["gate_up"], self.norm(x, "mlp_norm"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ self.p["down"].T
        return self.norm(x, "final_norm") if self.arch.state_norm else x

    def draft(self, embed: np.ndarray, features: np.ndarray, tokens: np.ndarray, at: int,
              depth: int) -> list[np.ndarray]:
        """Outputs after position `at` and after each of `depth` further tokens, drafted."""
        made: list[np.ndarray] = []
        for j in range(depth + 1):
            known = np.stack([*features[: at + 1], *made])
            made.append(self.outputs(embed[tokens[1 : at + 2 + j]], known)[-1])
        return made


@KINDS
def test_unroll_drafts_from_every_position(arch: EagleArch, inputs: dict[str, Any]) -> None:
    params = weights(arch) | {"final_norm": jnp.linspace(0.5, 3, 8)}
    got = jax.jit(functools.partial(eagle_model.unroll, arch, steps=STEPS))(params, **inputs)
    plain = Plain(arch, params)
    embed, features, tokens = (np.asarray(inputs[n]) for n in ("embed", "features", "tokens"))
    checked = 0
    for row, length in enumerate(np.asarray(inputs["length"])):
        for at in range(length - 1):
            depth = min(STEPS, length - 1 - at)
            want = plain.draft(embed, features[:, row].T, tokens[row], at, depth - 1)
            np.testing.assert_allclose([out[:, row, at] for out in got[:depth]], want, atol=1e-4)
            checked += depth
    assert checked == 4 + 4 + 4 + 3 + 2 + 1 + 4 + 3 + 2 + 1


@KINDS
def test_taps_and_outputs_are_normalised_once(arch: EagleArch) -> None:
    rng, scale = np.random.default_rng(2), np.linspace(0.5, 3, 8)
    params: dict[str, Any] = weights(arch) | {"final_norm": jnp.asarray(scale)}
    each, hidden = rng.standard_normal((3, 8, 2, 5)) * 30, rng.standard_normal((8, 2)) * 5
    taps, normed = each.reshape(24, 2, 5), hidden
    if arch.tap_norm:
        own = rng.uniform(0.5, 2, (3, 8))
        params["tap_norm"] = jnp.asarray(own)
        each = each / np.sqrt((each**2).mean(1, keepdims=True) + 1e-5) * own[..., None, None]
    if not arch.state_norm:  # else the network's output is normalised already
        normed = hidden / np.sqrt((hidden**2).mean(0) + 1e-5) * scale[:, None]
    got = eagle_model.project(arch, params, jnp.asarray(taps, jnp.float32))
    want = np.einsum("fi,i...->f...", params["fc"], each.reshape(24, 2, 5))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    got = eagle_model.logits(arch, params, None, jnp.asarray(hidden, jnp.float32))
    np.testing.assert_allclose(got, np.asarray(params["head"]) @ normed, rtol=1e-4, atol=1e-4)


def test_anchors_draft_as_if_they_were_alone(inputs: dict[str, Any]) -> None:
    anchors = jnp.asarray([[2, 3, 5], [3, 0, 0]])
    whole, some = UNROLL(weights(), **inputs), UNROLL(weights(), **inputs | {"anchors": anchors})
    for one, few in zip(whole, some, strict=True):
        want = jnp.take_along_axis(one, anchors[None], 2)
        np.testing.assert_allclose(few, want, atol=1e-5)


def test_garbage_beyond_length_changes_nothing(inputs: dict[str, Any]) -> None:
    clean = UNROLL(weights(), **inputs)
    dirty = inputs | {"features": inputs["features"].at[:, 1, 5:].set(jnp.nan),
                      "tokens": inputs["tokens"].at[1, 5:].set(-7)}
    for j, (one, other) in enumerate(zip(clean, UNROLL(weights(), **dirty), strict=True)):
        np.testing.assert_array_equal(one[:, 0], other[:, 0])
        np.testing.assert_array_equal(one[:, 1, : 4 - j], other[:, 1, : 4 - j])


def test_every_parameter_learns_and_padding_gives_no_gradient(inputs: dict[str, Any]) -> None:
    def loss(params: dict[str, Any], features: Any) -> Any:
        out = eagle_model.unroll(ARCH, params, steps=3, **(inputs | {"features": features}))
        taught = eagle_model.project(ARCH, params, jnp.arange(48.0).reshape(24, 2))
        return taught.sum() + sum(
            (eagle_model.logits(ARCH, params, None, h[:, :, : 4 - j]) ** 2).sum()
            for j, h in enumerate(out))

    dirty = inputs["features"].at[:, 1, 5:].set(jnp.nan)
    grads, by_feature = jax.jit(jax.grad(loss, (0, 1)))(weights(), dirty)
    for path, leaf in jax.tree.leaves_with_path(grads):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path
    assert (np.asarray(by_feature)[:, 1, 5:] == 0).all()
    assert np.isfinite(by_feature).all()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_the_actors_rows_are_those_of_the_actor(tied: bool) -> None:
    actor = dataclasses.replace(ACTOR, tied=tied)
    arch = EagleArch(actor, draft_vocab=6, own_head=False, state_norm=False)
    params, vocab = tiny_params(actor), jnp.asarray([0, 3, 4, 9, 18, 19])
    hidden = jnp.asarray(np.random.default_rng(1).standard_normal((8, 5)), jnp.float32)
    own = {"final_norm": params["final_norm"] * 2}
    head = params["embed" if tied else "head"][vocab]
    got = eagle_model.logits(arch, own, head, hidden)
    normed = transformer.rms_norm(hidden, own["final_norm"], actor.norm_eps)
    np.testing.assert_allclose(got, transformer.logits(actor, params, normed)[vocab], atol=1e-6)


@pytest.mark.parametrize("changes,message", [
    ({"taps": (1, 4)}, r"taps = \(1, 4\): .*0\.\.3"), ({"taps": (2, 1)}, "ascending"),
    ({"taps": (-1, 1)}, "taps"), ({"draft_vocab": 21}, "draft_vocab = 21: .*20 tokens")])
def test_arch_of_impossible_sizes_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EagleArch(ACTOR, **changes)


def test_draft_vocabulary_is_the_commonest_and_wanted_tokens() -> None:
    counts = np.asarray([5, 0, 9, 1, 7, 7, 0])
    np.testing.assert_array_equal(choose_vocab(counts, 3), [2, 4, 5])
    np.testing.assert_array_equal(choose_vocab(counts, 3, always=(6,)), [2, 4, 6])
    assert choose_vocab(counts, 4).dtype == np.int32
