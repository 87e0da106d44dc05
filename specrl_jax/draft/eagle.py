"""The EAGLE-3 drafter: features of committed tokens, a cache of its own, and how both keep up.

Position t of the drafter joins the actor's feature g_t with token t + 1, so a row whose root stands
at `context` has that many positions. Those not processed yet (after a prefill, or after rounds
without speculation) are caught up in chunks before the tree grows; a round that drafts nothing pays
for storing its features and for nothing else.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from specrl_jax.config import at_least, check
from specrl_jax.draft import eagle_model
from specrl_jax.draft.base import Drafter, Occasion, Survive
from specrl_jax.draft.eagle_grow import CHILDREN, Bound, Growth, attend, grow
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.draft.tree import roots
from specrl_jax.model.architecture import is_param
from specrl_jax.model.transformer import embed
from specrl_jax.sharding import ROLLOUT_RULES, ROWS, replicated, shardings, spec_of
from specrl_jax.structs import Array, DraftTree, Fill, Path, Sampling, SpecConfig, Tip, Verdict

_MULTIPLE = 128  # cache positions that tree attention reads at once


@struct.dataclass
class EagleState:
    """What lies at and beyond a row's context or `length` is garbage and never read.

    S' exceeds the actor's S by a chunk, because an update that does not fit is moved, not cut.
    """

    features: Array  # f[B, S', F]
    tokens: Array  # i32[B, S' + 1] from the first of the prompt on
    k: Array  # f[B, G, E, S']
    v: Array  # f[B, G, S', E]
    length: Array  # i32[B] positions processed
    hidden: Array  # f[B, F] output at the last of them
    prompt: int = struct.field(pytree_node=False)  # P


def eagle(arch: EagleArch, depth: int, branch: int, nodes: int, children: str = "perturbed", *,
          origin: int = 0, dtype: Any = jnp.float32) -> Drafter:
    """The drafter with D = `depth`, K = `branch`, N = `nodes`.

    Its own parameters, what `bind` is given, are {"weights": the tree of eagle_model.describe,
    "vocab": i32[Vd] ascending token ids}.

    Args:
      children: which of the drafter's tokens are tried: the best ones `perturbed` by the noise that
        the actor's own draw will use, the `top` of its distribution, or some `sampled` from it.
      origin: what DraftTree.origin says of its nodes.
      dtype: of the stored features and of its cache.

    Raises:
      ConfigError: sizes that cannot work.
    """
    check(children in CHILDREN, "draft.children", children, f"choose one of {', '.join(CHILDREN)}")
    at_least(1, spec__max_steps=depth)
    at_least(2, spec__max_nodes=nodes)
    check(1 <= branch <= arch.draft_vocab, "spec.max_branch", branch,
          f"must lie in 1..{arch.draft_vocab}, the draft vocabulary")
    growth = Growth(arch, depth, branch, nodes, children, origin)
    chunk = max(depth + 1, 8)
    return Drafter(
        nodes=nodes, depth=depth,
        init=functools.partial(_init, arch, chunk, dtype),
        propose=functools.partial(_propose, growth, chunk),
        observe=_observe,
        take=lambda state, rows: jax.tree.map(lambda a: a[rows], state),
        fork=_fork, prefill=_prefill,
        bind=functools.partial(_bind, arch, jax.jit(_cast, static_argnums=(0, 3, 4))),
        names=("eagle",), taps=arch.taps,
        project=lambda params, taps: eagle_model.project(params.weights, taps))


def _bind(arch: EagleArch, cast: Any, actor: Any, own: Any) -> Bound:
    """Joins the drafter's parameters with what it reads of the published actor's, jax arrays."""
    rows = actor["embed" if arch.actor.tied else "head"]
    place = rows.sharding
    mesh = place.mesh if isinstance(place, NamedSharding) else None
    weights, vocab, head = cast(arch, own, rows, rows.dtype, mesh)
    if not arch.own_head and arch.draft_vocab == arch.actor.vocab_size:
        head = rows  # as it is: a copy would cost as much as the actor's
    return Bound(weights=weights, vocab=vocab, embed=actor["embed"], head=head)


def _cast(arch: EagleArch, own: Any, rows: Array, dtype: Any, mesh: Any) -> tuple[Any, ...]:
    """Weights in the rollout's dtype and sharding, and the head's rows, gathered once."""
    weights = jax.tree.map(lambda a: a.astype(dtype), own["weights"])
    trimmed = not arch.own_head and arch.draft_vocab < arch.actor.vocab_size
    head = rows[own["vocab"]] if trimmed else None
    if mesh is None:
        return weights, own["vocab"], head
    hold = jax.lax.with_sharding_constraint
    places = shardings(eagle_model.describe(arch), ROLLOUT_RULES, mesh, is_param)
    if trimmed:
        head = hold(head, NamedSharding(mesh, spec_of(head.shape, ("vocab", None), ROLLOUT_RULES,
                                                      mesh)))
    return jax.tree.map(hold, weights, places), hold(own["vocab"], replicated(mesh)), head


def _init(arch: EagleArch, chunk: int, dtype: Any, occasion: Occasion) -> EagleState:
    layer, width, b = arch.layer, arch.actor.hidden_size, occasion.batch
    places = -(-(occasion.cache + chunk) // _MULTIPLE) * _MULTIPLE
    g, e = layer.num_kv_heads, layer.head_dim
    return EagleState(
        features=np.zeros((b, places, width), dtype), tokens=np.zeros((b, places + 1), np.int32),
        k=np.zeros((b, g, e, places), dtype), v=np.zeros((b, g, places, e), dtype),
        length=np.zeros(b, np.int32), hidden=np.zeros((b, width), dtype),
        prompt=occasion.prompt.shape[1])


# Slots.


def _overwrite(whole: Array, source: Array, block: Callable[[Array, Array], Array]) -> Array:
    """Rows b with source[b] >= 0 begin with block(whole, source[b]), of shape [1, ...].

    A loop of slice updates: a scatter would copy the whole array (experiments/LOG.md).
    """

    def write(b: Array, whole: Array) -> Array:
        new = block(whole, jnp.maximum(source[b], 0))
        start = (b, *(jnp.int32(0),) * (whole.ndim - 1))
        old = jax.lax.dynamic_slice(whole, start, new.shape)
        new = jnp.where(source[b] >= 0, new.astype(whole.dtype), old)
        return jax.lax.dynamic_update_slice(whole, new, start)

    return jax.lax.fori_loop(0, source.shape[0], write, whole)


def _fork(state: EagleState, fill: Fill) -> EagleState:
    """Copies prompts between slots, with what the drafter's cache holds of them.

    The source may have run on: only its prompt is the copy's too, and the output at the prompt's
    last position is gone, so at least that one is processed again.
    """
    source = jnp.where(fill.copy == jnp.arange(fill.copy.shape[0]), -1, fill.copy)

    def first(axis: int) -> Callable[[Array, Array], Array]:
        def block(whole: Array, at: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(whole, at, 1, 0)
            return jax.lax.slice_in_dim(row, 0, state.prompt, axis=axis)
        return block

    known = jnp.clip(jnp.minimum(state.length[jnp.maximum(fill.copy, 0)], fill.length - 1), 0)
    return state.replace(
        features=_overwrite(state.features, source, first(1)),
        tokens=_overwrite(state.tokens, source, first(1)),
        k=_overwrite(state.k, source, first(3)), v=_overwrite(state.v, source, first(2)),
        length=jnp.where(fill.copy >= 0, known, state.length))


def _prefill(state: EagleState, fill: Fill, tokens: Array, features: Array) -> EagleState:
    features = jnp.moveaxis(features, 0, -1)  # [p, P', F]

    def block(new: Array) -> Callable[[Array, Array], Array]:
        return lambda whole, at: jax.lax.dynamic_slice_in_dim(new, at, 1, 0)

    return state.replace(
        features=_overwrite(state.features, fill.source, block(features)),
        tokens=_overwrite(state.tokens, fill.source, block(tokens)),
        length=jnp.where(fill.source >= 0, 0, state.length))


def _observe(params: Bound, state: EagleState, tip: Tip, verdict: Verdict, path: Path
             ) -> EagleState:
    """Appends the path; what lies beyond the committed part is garbage until overwritten."""
    taps = path.taps.astype(state.features.dtype)

    def write(b: Array, arrays: tuple[Array, Array]) -> tuple[Array, Array]:
        features, tokens = arrays
        at, row = tip.context[b], functools.partial(jax.lax.dynamic_slice_in_dim, start_index=b,
                                                    slice_size=1)
        return (jax.lax.dynamic_update_slice(features, row(taps), (b, at, 0)),
                jax.lax.dynamic_update_slice(tokens, row(verdict.tokens), (b, at + 1)))

    features, tokens = jax.lax.fori_loop(0, taps.shape[0], write, (state.features, state.tokens))
    return state.replace(features=features, tokens=tokens)


# Rounds.


def _propose(growth: Growth, chunk: int, params: Bound, state: EagleState, tip: Tip,
             rows: Sampling, spec: SpecConfig, survive: Survive) -> tuple[DraftTree, EagleState]:
    """Trees of what the drafter expects, or roots alone where nothing is asked for.

    What ends a loop or selects a branch is reduced over all data shards first.
    """
    wanted = (spec.steps > 0) & (jax.lax.pmax(tip.live.any().astype(jnp.int32), ROWS) > 0)
    missing = jnp.where(tip.live & wanted, tip.context - state.length, 0)
    trips = jax.lax.pmax((missing.max() + chunk - 1) // chunk, ROWS)
    state = _catch_up(growth.arch, chunk, params, state, tip, trips)
    tree = jax.lax.cond(
        wanted,
        lambda: grow(growth, params, (state.k, state.v), state.hidden.T, tip, rows, spec, survive),
        lambda: roots(tip.root, tip.live, growth.nodes))
    return tree, state


def _catch_up(arch: EagleArch, chunk: int, params: Bound, state: EagleState, tip: Tip,
              trips: Array) -> EagleState:
    """Processes the positions of live rows up to their context, `chunk` of each row at a time."""
    batch = tip.root.shape[0]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    ahead = jnp.arange(chunk, dtype=jnp.int32)[None]
    packed = (jnp.repeat(row[:, 0], chunk), jnp.tile(ahead[0], batch))
    chain = jnp.broadcast_to(jnp.maximum(ahead - 1, 0), (batch, chunk))

    def body(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        k, v, length, hidden = carry
        count = jnp.where(tip.live, jnp.clip(tip.context - length, 0, chunk), 0)
        real, place = ahead < count[:, None], length[:, None] + ahead
        feature = jnp.where(real[..., None], state.features[row, place], 0)
        token = jnp.where(real, state.tokens[row, place + 1], 0)

        def look(q: Array, new_k: Array, new_v: Array) -> Array:
            fresh = (new_k.transpose(2, 3, 0, 1), new_v.transpose(2, 3, 0, 1))
            return attend(q, packed, fresh, chain, (k, v), length)

        out, (new_k, new_v) = eagle_model.step(
            arch, params.weights, embed({"embed": params.embed}, token),
            jnp.moveaxis(feature, -1, 0), place, look)
        # Nothing but finite numbers is cached: attention asks that of what it masks. It also makes
        # the write wait for the attention that reads the cache; unordered, XLA copies the cache.
        sound = jnp.isfinite(out).all(0)[None, None]
        new_k, new_v = (jnp.where(sound, a, 0) for a in (new_k, new_v))
        last = jnp.take_along_axis(jnp.moveaxis(out, 0, -1), jnp.maximum(count - 1, 0)[
            :, None, None], 1)[:, 0]
        hidden = jnp.where(count[:, None] > 0, last.astype(hidden.dtype), hidden)
        k, v = _append(k, v, length, new_k.transpose(2, 0, 1, 3), new_v.transpose(2, 0, 3, 1))
        return k, v, length + count, hidden

    carry = (state.k, state.v, state.length, state.hidden)
    k, v, length, hidden = jax.lax.fori_loop(0, trips, body, carry)
    return state.replace(k=k, v=v, length=length, hidden=hidden)


def _append(k: Array, v: Array, length: Array, new_k: Array, new_v: Array) -> tuple[Array, Array]:
    """Writes each row's new_k [B, G, E, C] and new_v [B, G, C, E] at its length."""
    zero = jnp.int32(0)

    def write(b: Array, kv: tuple[Array, Array]) -> tuple[Array, Array]:
        k, v = kv
        columns, lines = (jax.lax.dynamic_slice_in_dim(a, b, 1, 0) for a in (new_k, new_v))
        return (jax.lax.dynamic_update_slice(k, columns.astype(k.dtype),
                                             (b, zero, zero, length[b])),
                jax.lax.dynamic_update_slice(v, lines.astype(v.dtype),
                                             (b, zero, length[b], zero)))

    return jax.lax.fori_loop(0, length.shape[0], write, (k, v))
