"""A smaller model of the actor's tokenizer drafts: chains and trees from its own distribution.

It reads committed tokens and nothing else of the actor. Its cache holds every position up to the
root, which is processed with what a round committed before the next tree grows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from specrl_jax.config import at_least, check
from specrl_jax.draft import cached
from specrl_jax.draft.cached import Held
from specrl_jax.draft.network import CHILDREN, KV, Growth, Network
from specrl_jax.draft.protocol import Drafter, RolloutInfo, Survive
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture, describe, is_param
from specrl_jax.model.transformer import Attend, Params
from specrl_jax.sharding import ROLLOUT_RULES, shardings
from specrl_jax.structs import Array, DraftTree, Frontier, Sampling, SlotFill, SpecConfig

_AHEAD = 0  # position t reads token t


@struct.dataclass
class SmallState:
    """What lies at and beyond a row's context or `length` is garbage and never read."""

    tokens: Array  # i32[B, S' + 1] from the first of the prompt on
    kv: KV  # (k [B, G, E, S'], v [B, G, S', E]) a layer
    length: Array  # i32[B] positions processed
    hidden: Array  # f[B, F] final hidden state of the last of them
    prompt: int = struct.field(pytree_node=False)  # P


def small_lm(arch: Architecture, depth: int, branch: int, nodes: int, children: str = "perturbed",
             *, temperature: float = 1.0, origin: int = 0, drawn: bool = False,
             dtype: Any = jnp.float32) -> Drafter:
    """The drafter with D = `depth`, K = `branch`, N = `nodes`.

    Its own parameters, what `bind` is given, are those of architecture.describe.

    Args:
      arch: the small model's.
      children, temperature, drawn: as of draft/eagle.py.
      origin: what DraftTree.origin says of its nodes.
      dtype: of its cache.

    Raises:
      ConfigError: sizes that cannot work.
    """
    check(children in CHILDREN, "draft.children", children, f"choose one of {', '.join(CHILDREN)}")
    at_least(1, spec__max_depth=depth)
    at_least(2, spec__max_nodes=nodes)
    check(1 <= branch <= arch.vocab_size, "spec.max_branch", branch,
          f"must lie in 1..{arch.vocab_size}, the vocabulary")
    growth = Growth(_network(arch), depth, branch, nodes, children, origin, temperature, drawn)
    return Drafter(
        nodes=nodes, depth=depth, branch=branch,
        init=functools.partial(_init, arch, depth, dtype),
        propose=functools.partial(_propose, growth),
        observe=lambda params, state, frontier, verdict, path: state.replace(
            tokens=cached.extend(state.tokens, frontier.context + 1, verdict.tokens)),
        take=lambda state, rows: jax.tree.map(lambda a: a[rows], state),
        fork=_fork, prefill=_prefill,
        read_to=lambda state, context: state.replace(length=np.maximum(context - _AHEAD, 0)),
        bind=functools.partial(_bind, arch, jax.jit(_cast, static_argnums=(0, 2, 3))),
        names=("small_lm",))


def _network(arch: Architecture) -> Network:
    def run(params: Params, token: Array, _: Array | None, position: Array, attend: Attend
            ) -> Array:
        rotation = transformer.rotations(arch, position)
        known = jnp.minimum(token, arch.vocab_size - 1)  # the actor may have more rows
        x = transformer.embed(params, known)
        for index, layer in enumerate(params["layers"]):
            x, _ = transformer.block(arch, layer, index, x, rotation, attend, decode=True)
        return transformer.rms_norm(x, params["final_norm"], arch.norm_eps)

    return Network(
        run=run, logits=functools.partial(transformer.logits, arch, decode=True), ahead=_AHEAD,
        vocab=lambda params: jnp.arange(arch.vocab_size, dtype=jnp.int32))


def _bind(arch: Architecture, cast: Any, actor: Any, own: Params) -> Params:
    """The small model in the dtype and on the mesh of the published actor's jax arrays."""
    place, dtype = actor["embed"].sharding, actor["embed"].dtype
    return cast(arch, own, dtype, place.mesh if isinstance(place, NamedSharding) else None)


def _cast(arch: Architecture, own: Params, dtype: Any, mesh: Any) -> Params:
    weights = jax.tree.map(lambda a: a.astype(dtype), own)
    if mesh is None:
        return weights
    places = shardings(describe(arch), ROLLOUT_RULES, mesh, is_param)
    return jax.tree.map(jax.lax.with_sharding_constraint, weights, places)


def _init(arch: Architecture, depth: int, dtype: Any, info: RolloutInfo) -> SmallState:
    b, g, e = info.batch, arch.num_kv_heads, arch.head_dim
    places = cached.places(info.cache, depth)
    return SmallState(
        tokens=np.zeros((b, places + 1), np.int32),
        kv=[(np.zeros((b, g, e, places), dtype), np.zeros((b, g, places, e), dtype))
            for _ in range(arch.num_layers)],
        length=np.zeros(b, np.int32), hidden=np.zeros((b, arch.hidden_size), dtype),
        prompt=info.prompt.shape[1])


def _fork(state: SmallState, fill: SlotFill) -> SmallState:
    """Copies prompts between slots, with what the cache holds of them."""
    return state.replace(
        tokens=cached.copy(state.tokens, fill, state.prompt),
        kv=cached.copy_kv(state.kv, fill, state.prompt),
        length=cached.known(state.length, fill, _AHEAD))


def _prefill(
    state: SmallState, fill: SlotFill, tokens: Array, features: Array | None
) -> SmallState:
    return state.replace(tokens=cached.enter(state.tokens, fill, tokens),
                         length=jnp.where(fill.source >= 0, 0, state.length))


def _propose(growth: Growth, params: Params, state: SmallState, frontier: Frontier, rows: Sampling,
             spec: SpecConfig, survive: Survive) -> tuple[DraftTree, SmallState]:
    held = Held(kv=state.kv, length=state.length, hidden=state.hidden)
    tree, held = cached.propose(
        growth, params, held, state.tokens, None, frontier, rows, spec, survive
    )
    return tree, state.replace(kv=held.kv, length=held.length, hidden=held.hidden)
