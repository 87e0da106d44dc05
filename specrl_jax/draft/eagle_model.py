"""The EAGLE-3 network (arXiv 2503.01840) as pure functions over a parameter tree; what trains it.

At position t it joins what the actor thought there, the feature g_t, with the token that followed,
x_{t+1}; its output, normalised, goes through the draft head and predicts x_{t+2}. Beyond the last
token that the actor has seen, the network's own output stands in for the feature. Activations are
feature-major, [F, ...tokens], as in model/transformer.py.

EAGLE-3.1 (arXiv 2605.09992) is `tap_norm` and `state_norm`: without them deep taps, and the output
of deep drafts, outgrow the rest.

Further letters: `Vd` draft vocabulary, `A` = number of tapped layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.config import check
from specrl_jax.draft.trainable import DraftInputs, TrainableDrafter, from_predictions
from specrl_jax.model import attention, layers, transformer
from specrl_jax.model.architecture import Architecture, Param, draw
from specrl_jax.structs import Array, Params, PyTree

ANCHORS_AT_ONCE = 256  # of training whose attention scores exist at once
SMALL = 0.3  # what `warm_start` adds to the actor's feature and logits

Attend = Callable[[Array, Array, Array], Array]
"""(q [G, R, E, ...], k [G, E, ...], v [G, E, ...]) -> [G, R, E, ...]"""


@dataclasses.dataclass(frozen=True)
class EagleArch:
    """Static shape of an EAGLE-3 head. Empty fields become the actor's or a default."""

    actor: Architecture
    taps: tuple[int, ...] = ()  # tapped layers of the actor, 0-based, ascending
    draft_vocab: int = 0  # Vd
    own_head: bool = True  # else the actor's rows of the draft vocabulary
    tap_norm: bool = True  # each tap is normalised before `fc`
    state_norm: bool = True  # outputs are normalised before they stand in for features
    like: Architecture | None = None  # sizes of the one layer, with the actor's width

    def __post_init__(self) -> None:
        actor = self.actor
        put = functools.partial(object.__setattr__, self)
        put("taps", self.taps or default_taps(actor.num_layers))
        put("draft_vocab", self.draft_vocab or actor.vocab_size)
        put("like", dataclasses.replace(self.layer, num_layers=1, qkv_bias=False, qk_norm=False,
                                        tied=False, family="llama"))
        taps = tuple(sorted(set(self.taps)))
        check(self.taps == taps and 0 <= taps[0] and taps[-1] < actor.num_layers, "taps", self.taps,
              f"name ascending layers of the actor's 0..{actor.num_layers - 1}")
        check(self.draft_vocab <= actor.vocab_size, "draft_vocab", self.draft_vocab,
              f"the actor has {actor.vocab_size} tokens; draft.vocab = 0 takes them all")

    @property
    def layer(self) -> Architecture:
        """The architecture of the one layer, for functions shared with the actor."""
        return self.like or self.actor


def default_taps(layers: int) -> tuple[int, ...]:
    """Returns a low, a middle and a high layer: 1, L/2 - 1, L - 4; spread out if L is small."""
    return ((1, layers // 2 - 1, layers - 4) if layers >= 7
            else tuple(sorted({0, (layers - 1) // 2, layers - 1})))


def describe(arch: EagleArch) -> PyTree:
    """Returns the tree of trained parameters with a `Param` at each leaf."""
    layer, f = arch.layer, arch.actor.hidden_size
    g, r, e, i = layer.num_kv_heads, layer.group, layer.head_dim, layer.intermediate_size
    std, out_std = 0.02, 0.02 / 2**0.5
    tree = {"fc": Param((f, len(arch.taps) * f), ("embed", None), std),
            "embed_norm": Param((f,), ("embed",), 0), "feature_norm": Param((f,), ("embed",), 0),
            "qkv": Param((g, r + 2, e, 2 * f), ("kv_heads", None, None, "embed"), std),
            "o": Param((f, g, r, e), ("embed", "kv_heads", None, None), out_std),
            "mlp_norm": Param((f,), ("embed",), 0),
            "gate_up": Param((2, i, f), (None, "mlp", "embed"), std),
            "down": Param((f, i), ("embed", "mlp"), out_std),
            "final_norm": Param((f,), ("embed",), 0)}
    if arch.tap_norm:
        tree["tap_norm"] = Param((len(arch.taps), f), (None, "embed"), 0)
    if arch.own_head:
        tree["head"] = Param((arch.draft_vocab, f), ("vocab", "embed"), std)
    return tree


def initialize(arch: EagleArch, seed: int) -> Params:
    """Returns random float32 parameters on the host, a pure function of (arch, seed)."""
    return draw(describe(arch), seed)


def choose_vocab(counts: np.ndarray, size: int, always: Sequence[int] = ()) -> np.ndarray:
    """Returns i32[size]: ascending ids of `always` and of the tokens with the highest counts."""
    rank = np.array(counts, np.float64)
    rank[list(always)] = np.inf
    return np.sort(np.argsort(-rank, kind="stable")[:size]).astype(np.int32)


def project(arch: EagleArch, params: Params, taps: Array, decode: bool = False) -> Array:
    """Returns features f[F, ...] of tapped layers f[A * F, ...]; see transformer.project."""
    if arch.tap_norm:
        each = taps.reshape(len(arch.taps), -1, *taps.shape[1:])
        taps = jax.vmap(transformer.rms_norm, (0, 0, None))(
            each, params["tap_norm"], arch.layer.norm_eps).reshape(taps.shape)
    return transformer.project(params["fc"], taps, decode=decode)


def logits(arch: EagleArch, params: Params, head: Array | None, hidden: Array,
           decode: bool = False) -> Array:
    """Returns f32[Vd, ...] of the network's outputs [F, ...].

    `head` f[Vd, F], the actor's rows of the draft vocabulary, is read if the drafter has none.
    """
    weight: Any = params["head"] if arch.own_head else head
    normed = hidden if arch.state_norm else _final_norm(arch, params, hidden)
    return transformer.project(weight, normed, decode=decode, dtype=jnp.float32)


def _final_norm(arch: EagleArch, params: Params, x: Array) -> Array:
    return transformer.rms_norm(x, params["final_norm"], arch.layer.norm_eps)


def step(arch: EagleArch, params: Params, embedded: Array, feature: Array, position: Array,
         attend: Attend, decode: bool = False) -> tuple[Array, tuple[Array, Array]]:
    """Runs the layer on embeddings [F, ...] of the tokens that followed positions i32[...].

    Args:
      feature: [F, ...] of each position: the actor's, or this function's output before it.
      attend: may keep the keys and values that it gets.
      decode: see transformer.project.

    Returns:
      the output [F, ...], after the final norm if `state_norm`; and (k, v), each [G, E, ...].
    """
    layer, joined = arch.layer, _joined(arch, params, embedded, feature)
    qkv = transformer.project(params["qkv"], joined, decode=decode)
    rotation = transformer.rotations(layer, position)
    q = transformer.rotate(qkv[:, : layer.group], rotation)
    k, v = transformer.rotate(qkv[:, layer.group], rotation), qkv[:, layer.group + 1]
    x = feature + transformer.project(params["o"], attend(q, k, v), 3, decode)
    x += transformer.feed_forward(layer, params, x, decode)
    return _final_norm(arch, params, x) if arch.state_norm else x, (k, v)


def keys(arch: EagleArch, params: Params, embedded: Array, feature: Array, position: Array
         ) -> tuple[Array, Array]:
    """Returns only the (k, v) of `step`, each [G, E, ...]."""
    both = _joined(arch, params, embedded, feature)
    k, v = (transformer.project(params["qkv"][:, arch.layer.group + i], both) for i in (0, 1))
    return transformer.rotate(k, transformer.rotations(arch.layer, position)), v


def _joined(arch: EagleArch, params: Params, embedded: Array, feature: Array) -> Array:
    """Returns the layer's input, [2 F, ...]."""
    return jnp.concatenate([transformer.rms_norm(x, params[name], arch.layer.norm_eps) for x, name
                            in ((embedded, "embed_norm"), (feature, "feature_norm"))])


def unroll(arch: EagleArch, params: Params, embed: Array, features: Array, tokens: Array,
           length: Array, anchors: Array, steps: int) -> list[Array]:
    """Runs the network on its own outputs: training-time test, section 3.2 of the paper.

    Step 0 joins feature t with token t + 1; step j joins the output of step j - 1 at t with token
    t + 1 + j, as a draft of depth j that starts from position t does. The output of step j at t
    predicts token t + 2 + j, as the actor's logits at t + 1 + j do; it is garbage from
    t + 1 + j = length on. Differentiable.

    Args:
      embed: the actor's embedding, [V, F].
      features: f[F, B, S] of the actor, projected.
      tokens: i32[B, S], right-padded; length: i32[B].
      anchors: i32[B, T] positions t; of all others only keys and values are computed.

    Returns the outputs of each step, [F, B, T].
    """
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    real = position < length[:, None]
    tokens = jnp.pad(jnp.where(real, tokens, 0), ((0, 0), (0, steps)))
    features = jnp.where(real[None], features, 0)

    def embedded(at: Array) -> Array:
        return jnp.moveaxis(embed[jnp.take_along_axis(tokens, at, 1)], -1, 0)

    cached = keys(arch, params, embedded(position + 1), features, position)
    long = anchors.shape[1] > ANCHORS_AT_ONCE  # then steps run again in the backward pass
    hidden = jnp.take_along_axis(features, anchors[None], 2)
    drafted, out = [], []
    for j in range(steps):
        attend = _unrolled_attend(cached, anchors, drafted, first=j == 0)
        run = functools.partial(step, arch, attend=attend)
        hidden, own = (jax.checkpoint(run) if long else run)(
            params, embedded(anchors + 1 + j), hidden, anchors + j)
        out.append(hidden)
        drafted += [own] if j else []  # step 0's are cached
    return out


def _unrolled_attend(cached: tuple[Array, Array], anchors: Array,
                     drafted: Sequence[tuple[Array, Array]], first: bool) -> Attend:
    """Returns attention to the cached keys [G, E, B, S] up to an anchor i32[B, T], and to the
    anchor's own [G, E, B, T] since; those of step 0 are cached.
    """
    drafted = tuple(drafted)

    def attend(q: Array, k: Array, v: Array) -> Array:
        own = drafted if first else (*drafted, (k, v))
        return attention.in_chunks(some, ANCHORS_AT_ONCE, q, anchors, own)

    def some(q: Array, anchors: Array, own: Sequence[tuple[Array, Array]]) -> Array:
        before = jnp.arange(cached[0].shape[3])[None, None] <= anchors[..., None]
        score = jnp.einsum("grebt,gebs->grbts", q, cached[0], preferred_element_type=jnp.float32)
        score = jnp.where(before[None, None], score, -jnp.inf)
        later = [jnp.einsum("grebt,gebt->grbt", q, key, preferred_element_type=jnp.float32)
                 for key, _ in own]
        score = jnp.concatenate([score, *(s[..., None] for s in later)], -1) * q.shape[2] ** -0.5
        weight = jax.nn.softmax(score, -1).astype(cached[1].dtype)
        total = before.shape[2]
        out = jnp.einsum("grbts,gebs->grebt", weight[..., :total], cached[1])
        for i, (_, value) in enumerate(own, total):
            out += weight[..., i][:, :, None] * value[:, None]
        return out

    return attend


def trainable(arch: EagleArch) -> TrainableDrafter:
    """Returns what trains a head of `arch`; its outputs are the network's, f[F, b, T]."""
    def outputs(params: Params, inputs: DraftInputs, depths: int) -> list[Array]:
        features = project(arch, params, inputs.taps)
        return unroll(arch, params, inputs.embed, features, inputs.tokens,
                                  inputs.length, inputs.columns(-2), depths)

    return from_predictions(outputs, lambda params, inputs, output: logits(
        arch, params, inputs.head, output), arch.draft_vocab, arch.taps, describe(arch))


def warm_start(arch: EagleArch, params: Params, actor: Params, head: Array, scale: np.ndarray
               ) -> Params:
    """Returns a head that starts from the actor, worth several epochs (experiments/LOG.md).

    The feature is the highest tap plus a little of all taps, near norm 1 a coordinate. The MLP is
    the actor's last one if it has that size; so are the output head and its norm. What is added to
    the feature and to the logits starts small: an untrained head must not be confident.

    Args:
      params: random.
      head: f[Vd, F] the actor's rows of the draft vocabulary.
      scale: f32[A] root mean square of each tap.
    """
    scale = np.ones_like(scale) if arch.tap_norm else scale
    last, f = layers.layer_of(actor["layers"], -1), arch.actor.hidden_size
    fc = params["fc"].reshape(f, len(scale), f) / np.std(params["fc"])
    fc = fc * (SMALL / (scale[:, None] * (len(scale) * f) ** 0.5))
    fc[:, -1] += np.eye(f) / scale[-1]
    taken = {"fc": fc.reshape(f, -1), "final_norm": SMALL * actor["final_norm"]}
    if last["down"].shape == params["down"].shape:
        taken |= {"gate_up": last["gate_up"], "mlp_norm": last["mlp_norm"],
                  "down": SMALL * last["down"]}
    if arch.own_head:
        taken["head"] = head
    return params | {name: np.asarray(a, np.float32) for name, a in taken.items()}
