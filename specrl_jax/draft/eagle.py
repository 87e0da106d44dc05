"""The EAGLE-3 drafter: features of committed tokens, a cache of its own, and how both keep up.

Position t of the drafter joins the actor's feature g_t with token t + 1, so a row whose root stands
at `context` has that many positions. Those not processed yet (after a prefill, or after rounds
without speculation) are caught up in chunks before the tree grows; a round that drafts nothing pays
for storing its features and for nothing else.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from specrl_jax.config import at_least, check
from specrl_jax.draft import cached, eagle_model
from specrl_jax.draft.cached import Held
from specrl_jax.draft.eagle_model import EagleArch, Params
from specrl_jax.draft.network import CHILDREN, Growth, Network
from specrl_jax.draft.protocol import Drafter, RolloutInfo, Survive
from specrl_jax.model.architecture import is_param
from specrl_jax.model.transformer import Attend, embed
from specrl_jax.sharding import ROLLOUT_RULES, replicated, shardings, spec_of
from specrl_jax.structs import (
    Array,
    DraftTree,
    Frontier,
    Path,
    Sampling,
    SlotFill,
    SpecConfig,
    Verdict,
)

_AHEAD = 1  # position t reads token t + 1


@struct.dataclass
class Bound:
    """What drafting reads, in the rollout's dtype."""

    weights: Params  # of eagle_model.describe
    vocab: Array  # i32[Vd] token ids, ascending
    embed: Array  # f[V, F] the actor's
    head: Array | None  # f[Vd, F] the actor's rows, unless the drafter has its own head


@struct.dataclass
class EagleState:
    """What lies at and beyond a row's context or `length` is garbage and never read."""

    features: Array  # f[B, S', F]
    tokens: Array  # i32[B, S' + 1] from the first of the prompt on
    k: Array  # f[B, G, E, S']
    v: Array  # f[B, G, S', E]
    length: Array  # i32[B] positions processed
    hidden: Array  # f[B, F] output at the last of them
    prompt: int = struct.field(pytree_node=False)  # P


def eagle(arch: EagleArch, depth: int, branch: int, nodes: int, children: str = "perturbed", *,
          temperature: float = 1.0, origin: int = 0, drawn: bool = False,
          dtype: Any = jnp.float32) -> Drafter:
    """The drafter with D = `depth`, K = `branch`, N = `nodes`.

    Its own parameters, what `bind` is given, are {"weights": the tree of eagle_model.describe,
    "vocab": i32[Vd] ascending token ids}.

    Args:
      children: which of the drafter's tokens are tried: the best ones `perturbed` by the noise that
        the actor's own draw will use, the `top` of its distribution, or some `sampled` from it.
      temperature: of its distribution, over the row's.
      origin: what DraftTree.origin says of its nodes.
      drawn: whether its trees carry what their tokens were drawn from; their shape then follows
        from ranks and depths alone.
      dtype: of the stored features and of its cache.

    Raises:
      ConfigError: sizes that cannot work.
    """
    check(children in CHILDREN, "draft.children", children, f"choose one of {', '.join(CHILDREN)}")
    at_least(1, spec__max_depth=depth)
    at_least(2, spec__max_nodes=nodes)
    check(1 <= branch <= arch.draft_vocab, "spec.max_branch", branch,
          f"must lie in 1..{arch.draft_vocab}, the draft vocabulary")
    growth = Growth(_network(arch), depth, branch, nodes, children, origin, temperature, drawn)
    return Drafter(
        nodes=nodes,
        depth=depth,
        branch=branch,
        init=functools.partial(_init, arch, depth, dtype),
        propose=functools.partial(_propose, growth),
        observe=_observe,
        take=lambda state, rows: jax.tree.map(lambda a: a[rows], state),
        fork=_fork,
        prefill=_prefill,
        read_to=lambda state, context: state.replace(length=np.maximum(context - _AHEAD, 0)),
        bind=functools.partial(_bind, arch, jax.jit(_cast, static_argnums=(0, 3, 4))),
        names=("eagle",),
        taps=arch.taps,
        project=lambda params, taps, decode=False: eagle_model.project(
            params.weights, taps, decode
        ),
    )


def _network(arch: EagleArch) -> Network:
    def run(params: Bound, token: Array, feature: Array, position: Array, attend: Attend) -> Array:
        embedded = embed({"embed": params.embed}, token)
        out, _ = eagle_model.step(arch, params.weights, embedded, feature, position,
                                  functools.partial(attend, 0), decode=True)
        return out

    return Network(
        run=run, vocab=lambda params: params.vocab, ahead=_AHEAD,
        logits=lambda params, hidden: eagle_model.logits(arch, params.weights, params.head, hidden,
                                                         decode=True))


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


def _init(arch: EagleArch, depth: int, dtype: Any, info: RolloutInfo) -> EagleState:
    layer, width, b = arch.layer, arch.actor.hidden_size, info.batch
    places = cached.places(info.cache, depth)
    g, e = layer.num_kv_heads, layer.head_dim
    return EagleState(
        features=np.zeros((b, places, width), dtype), tokens=np.zeros((b, places + 1), np.int32),
        k=np.zeros((b, g, e, places), dtype), v=np.zeros((b, g, places, e), dtype),
        length=np.zeros(b, np.int32), hidden=np.zeros((b, width), dtype),
        prompt=info.prompt.shape[1])


# Slots and rounds.


def _fork(state: EagleState, fill: SlotFill) -> EagleState:
    """Copies prompts between slots, with what the drafter's cache holds of them."""
    ((k, v),) = cached.copy_kv([(state.k, state.v)], fill, state.prompt)
    return state.replace(
        features=cached.copy(state.features, fill, state.prompt),
        tokens=cached.copy(state.tokens, fill, state.prompt),
        k=k, v=v, length=cached.known(state.length, fill, _AHEAD))


def _prefill(state: EagleState, fill: SlotFill, tokens: Array, features: Array) -> EagleState:
    return state.replace(
        features=cached.enter(state.features, fill, jnp.moveaxis(features, 0, -1)),
        tokens=cached.enter(state.tokens, fill, tokens),
        length=jnp.where(fill.source >= 0, 0, state.length))


def _observe(params: Bound, state: EagleState, frontier: Frontier, verdict: Verdict, path: Path
             ) -> EagleState:
    """Appends the path; what lies beyond the committed part is garbage until overwritten."""
    return state.replace(features=cached.extend(state.features, frontier.context, path.taps),
                         tokens=cached.extend(state.tokens, frontier.context + 1, verdict.tokens))


def _propose(growth: Growth, params: Bound, state: EagleState, frontier: Frontier, rows: Sampling,
             spec: SpecConfig, survive: Survive) -> tuple[DraftTree, EagleState]:
    held = Held(kv=[(state.k, state.v)], length=state.length, hidden=state.hidden)
    tree, held = cached.propose(growth, params, held, state.tokens, state.features, frontier, rows,
                                spec, survive)
    ((k, v),) = held.kv
    return tree, state.replace(k=k, v=v, length=held.length, hidden=held.hidden)
