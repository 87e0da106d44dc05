"""Drafters whose network has a cache of its own: their state, slots and rounds.

Tokens that were committed since the last draft are processed in chunks before a tree grows. A round
that drafts nothing processes nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from specrl_kernels.cache_append import cache_append, row_append

from specrl_jax.draft.grow import attend, grow, no_proposal
from specrl_jax.draft.network import KV, Growth, NetworkCache
from specrl_jax.draft.protocol import (
    Drafter,
    DraftRequest,
    Project,
    RolloutInfo,
    taps_as_features,
)
from specrl_jax.draft.tree import roots
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.rows import for_rows
from specrl_jax.sharding import (
    ROLLOUT_RULES,
    ROWS,
    on_any_shard,
    shardings,
    spec_of,
    straight_line,
)
from specrl_jax.structs import (
    Array,
    DrafterParams,
    DraftTree,
    Frontier,
    ModelParams,
    Params,
    Path,
    PyTree,
    SlotFill,
    Verdict,
    carrier,
)

T = TypeVar("T")
_MULTIPLE = 128  # cache positions that tree attention reads at once


class CachedState(struct.PyTreeNode):
    """The state of a drafter. Positions from a row's context on hold garbage and are never read."""

    cache: NetworkCache
    tokens: Array  # i32[B, S' + 1] of each row, prompt first
    features: Array | None  # f[B, S', F] of the actor at each position, if the drafter reads any
    prompt: int = struct.field(pytree_node=False)  # P


def drafter(growth: Growth, layer: Architecture, dtype: DTypeLike, *, name: str,
            bind: Callable[[ModelParams, DrafterParams], DrafterParams],
            taps: tuple[int, ...] = (), project: Project = taps_as_features) -> Drafter:
    """Returns the drafter that grows its trees with a network of layers like `layer`.

    Its cache and stored features have `dtype`; for the other arguments see Drafter.
    """
    ahead = growth.network.ahead
    return Drafter(
        nodes=growth.nodes, depth=growth.depth, branch=growth.branch,
        propose=functools.partial(_propose, growth),
        init=functools.partial(_init, layer, growth.depth, dtype, bool(taps)),
        prefill=_prefill, copy_prompt=functools.partial(_copy_prompt, ahead), observe=_observe,
        needs_catch_up=True, catch_up=functools.partial(_catch_up, growth),
        skip_to=lambda state, context: state.replace(cache=state.cache.replace(
            length=np.maximum(context - ahead, 0))),
        names=(name,), bind=bind, taps=taps, project=project)


def mesh_of(array: Array) -> Mesh | None:
    """Returns the mesh that an array is placed on, if it is on one."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


def split_heads(state: PyTree, placed: PyTree, mesh: Mesh) -> PyTree:
    """Returns the shardings `placed` of a drafter's state with each network cache split by head
    over `tensor`, as its layers are: otherwise every draft would gather the cache."""
    def split(part: PyTree, to: PyTree) -> PyTree:
        if not isinstance(part, NetworkCache):
            return to
        kv, last = jax.tree.map(lambda a: NamedSharding(mesh, PartitionSpec(ROWS, *spec_of(
            a.shape[1:], ("kv_heads", *[None] * (a.ndim - 2)), ROLLOUT_RULES, mesh))),
            (part.kv, part.last))
        return to.replace(kv=kv, last=last)

    return jax.tree.map(split, state, placed, is_leaf=lambda x: isinstance(x, NetworkCache))


def cast(weights: Params, described: Params, dtype: DTypeLike, mesh: Mesh | None) -> Params:
    """Casts weights and places them on a mesh; `described` has a `Param` for each. Runs in jit."""
    weights = jax.tree.map(lambda a: a.astype(dtype), weights)
    if mesh is None:
        return weights
    return jax.tree.map(jax.lax.with_sharding_constraint, weights,
                        shardings(described, ROLLOUT_RULES, mesh))


def chunk_of(depth: int) -> int:
    """Returns how many positions of a row are processed at once: at least what a round commits."""
    return max(depth + 1, 8)


def cache_size(cache: int, depth: int) -> int:
    """Returns S' for an actor with `cache` = S: a chunk more, because XLA moves a slice that does
    not fit instead of cutting it.
    """
    return -(-(cache + chunk_of(depth)) // _MULTIPLE) * _MULTIPLE


def _init(layer: Architecture, depth: int, dtype: DTypeLike, reads_features: bool, info: RolloutInfo
          ) -> CachedState:
    b, g, e, f = info.batch, layer.num_kv_heads, layer.head_dim, layer.hidden_size
    size, transposed = cache_size(info.cache, depth), info.platform == "tpu"

    def zeros(*shape: int, dtype: DTypeLike = dtype) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)  # a pod's features would fill a host

    value = (e, size) if transposed else (size, e)
    cache = carrier(NetworkCache, length=np.zeros(b, np.int32), hidden=zeros(b, f),
                    kv=[(zeros(b, g, e, size), zeros(b, g, *value))] * layer.num_layers,
                    last=[(zeros(b, g, e), zeros(b, g, e))] * layer.num_layers,
                    transposed=transposed)
    return carrier(CachedState, cache=cache, tokens=zeros(b, size + 1, dtype=np.int32),
                   features=zeros(b, size, f) if reads_features else None,
                   prompt=info.prompt.shape[1])


def _prefill(state: CachedState, fill: SlotFill, tokens: Array, features: Array | None
             ) -> CachedState:
    cache = state.cache.replace(length=jnp.where(fill.source >= 0, 0, state.cache.length))
    state = state.replace(cache=cache, tokens=enter(state.tokens, fill, tokens))
    if state.features is None:
        return state
    assert features is not None  # of a drafter with taps they never are
    return state.replace(features=enter(state.features, fill, jnp.moveaxis(features, 0, -1)))


def _copy_prompt(ahead: int, state: CachedState, fill: SlotFill) -> CachedState:
    """Copies prompts between slots, with their cached keys and values."""
    width, cache = state.prompt, state.cache
    slots = 3 if cache.transposed else 2
    kv = [(copy(k, fill, width, 3), copy(v, fill, width, slots)) for k, v in cache.kv]
    # The source may have run on: only its prompt is the copy's too. Its output at the prompt's last
    # position is gone, so at least that one is processed again.
    shared = jnp.minimum(cache.length[jnp.maximum(fill.copy, 0)], fill.length - ahead)
    cache = cache.replace(kv=kv, length=jnp.where(
        fill.copy >= 0, jnp.maximum(shared, 0), cache.length))
    features = None if state.features is None else copy(state.features, fill, width)
    return state.replace(cache=cache, tokens=copy(state.tokens, fill, width), features=features)


def overwrite(array: Array, source: Array, block: Callable[[Array, Array], Array]) -> Array:
    """Overwrites the start of rows b with source[b] >= 0 by block(array, source[b]), [1, ...].

    A loop of slice updates: a scatter would copy the whole array (experiments/LOG.md).
    """
    def write(b: Array, at: Array, array: Array) -> Array:
        start = (b, *(jnp.int32(0),) * (array.ndim - 1))
        return jax.lax.dynamic_update_slice(array, block(array, at).astype(array.dtype), start)

    return for_rows(source, write, array)


def enter(array: Array, fill: SlotFill, new: Array) -> Array:
    """Overwrites the start of prefilled slots by their rows of new [p, ...]."""
    return overwrite(array, fill.source, lambda _, at: jax.lax.dynamic_slice_in_dim(new, at, 1, 0))


def copy(array: Array, fill: SlotFill, width: int, axis: int = 1) -> Array:
    """Overwrites the first `width` entries along `axis` of copied slots by their source's."""
    source = jnp.where(fill.copy == jnp.arange(fill.copy.shape[0]), -1, fill.copy)
    return overwrite(array, source, lambda array, at: jax.lax.slice_in_dim(
        jax.lax.dynamic_slice_in_dim(array, at, 1, 0), 0, width, axis=axis))


def extend(array: T, at: Array, new: T, axis: Any = 1) -> T:
    """Writes `new` [B, ...] into rows of `array` from position at[b] along `axis` on.

    Both may be trees of arrays; `axis` is then a tree of ints. Accelerators write all rows at
    once; a CPU's scatter would copy the whole array.
    """
    if straight_line():
        return jax.tree.map(lambda array, new, axis: jax.vmap(
            lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(
                row, new.astype(row.dtype), at, axis - 1))(array, new, at), array, new, axis)

    def write(b: Array, array: Array, new: Array, axis: int) -> Array:
        row = jax.lax.dynamic_slice_in_dim(new, b, 1, 0).astype(array.dtype)
        start = [b if i == 0 else at[b] if i == axis else jnp.int32(0) for i in range(array.ndim)]
        return jax.lax.dynamic_update_slice(array, row, start)

    return jax.lax.fori_loop(0, at.shape[0], lambda b, array: jax.tree.map(
        functools.partial(write, b), array, new, axis), array)


def _append(cache: NetworkCache, fresh: KV, count: Array) -> KV:
    """Writes the first count[b] of new keys and values, [G, E, B, chunk] each."""
    if not cache.transposed:
        return [extend(old, cache.length, (k.transpose(2, 0, 1, 3), v.transpose(2, 0, 3, 1)),
                       (3, 2)) for old, (k, v) in zip(cache.kv, fresh, strict=True)]
    out: KV = []
    for old, pair in zip(cache.kv, fresh, strict=True):
        new = jnp.moveaxis(jnp.stack(pair), -1, 0)[:, None]
        k, v = cache_append([a[:, None] for a in old], new, cache.length, count)
        out.append((k[:, 0], v[:, 0]))
    return out


def _observe(params: DrafterParams, state: CachedState, frontier: Frontier, verdict: Verdict,
             path: Path) -> CachedState:
    """Appends the path; entries beyond the committed ones are garbage until overwritten."""
    at = frontier.context
    if straight_line():  # in one pass, because a TPU writes rows of a scatter one after the other
        tokens, index = state.tokens, jnp.arange(state.tokens.shape[1])[None] - at[:, None] - 1
        for d in range(verdict.tokens.shape[1]):
            tokens = jnp.where(index == d, verdict.tokens[:, d:d + 1], tokens)
    else:
        tokens = extend(state.tokens, at + 1, verdict.tokens)
    state = state.replace(tokens=tokens)
    if state.features is None:
        return state
    assert path.taps is not None  # of a drafter with taps it never is
    return state.replace(features=row_append(state.features, path.taps, at, verdict.count)
                         if straight_line() else extend(state.features, at, path.taps))


def _propose(growth: Growth, params: DrafterParams, state: CachedState, request: DraftRequest
             ) -> tuple[DraftTree, CachedState]:
    """Returns the network's likeliest trees, or roots alone where no draft is planned.

    What ends a loop or selects a branch is reduced over all data shards first.
    """
    frontier = request.frontier
    if straight_line():
        cache = _read(growth, params, state, frontier, 1)
        tree = grow(growth, params, cache, request)
        return tree, state.replace(cache=cache)
    wanted = (request.spec.depth > 0) & on_any_shard(frontier.live.any())
    chunks = jnp.where(wanted, _unread_chunks(growth, state, frontier), 0)
    cache = _read(growth, params, state, frontier, chunks)
    tree = jax.lax.cond(
        wanted,
        lambda: grow(growth, params, cache, request),
        lambda: roots(frontier.root, frontier.live, growth.nodes).replace(
            proposal=no_proposal(growth, params, frontier.root.shape[0])))
    return tree, state.replace(cache=cache)


def _catch_up(growth: Growth, params: DrafterParams, state: CachedState, frontier: Frontier
              ) -> CachedState:
    """Reads all but the chunk that `propose` reads; on a CPU that one reads whatever is missing."""
    if not straight_line():
        return state
    chunks = _unread_chunks(growth, state, frontier) - 1
    return state.replace(cache=_read(growth, params, state, frontier, chunks))


def _unread_chunks(growth: Growth, state: CachedState, frontier: Frontier) -> Array:
    """Returns i32[], how many chunks the row that is furthest behind has to read, on any shard."""
    chunk = chunk_of(growth.depth)
    missing = jnp.where(frontier.live, _target(growth, frontier) - state.cache.length, 0)
    return jax.lax.pmax((missing.max() + chunk - 1) // chunk, ROWS)


def _target(growth: Growth, frontier: Frontier) -> Array:
    """Returns i32[B], the positions to have processed before a draft."""
    return jnp.where(frontier.live, frontier.context + 1 - growth.network.ahead, 0)


def _read(growth: Growth, params: DrafterParams, state: CachedState, frontier: Frontier,
          chunks: Array | int) -> NetworkCache:
    """Returns the cache after processing up to `chunks` chunks of committed tokens."""
    target = _target(growth, frontier)

    def read(_: Any, cache: NetworkCache) -> NetworkCache:
        return _read_chunk(growth, params, state.replace(cache=cache), target)

    if isinstance(chunks, int):
        return read(0, state.cache)
    return jax.lax.fori_loop(0, chunks, read, state.cache)


def _read_chunk(growth: Growth, params: DrafterParams, state: CachedState, target: Array
                ) -> NetworkCache:
    """Processes one chunk of positions of each row, none at or beyond target i32[B]."""
    network, chunk = growth.network, chunk_of(growth.depth)
    cache, tokens, features = state.cache, state.tokens, state.features
    batch = target.shape[0]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    step = jnp.arange(chunk, dtype=jnp.int32)[None]
    packed = (jnp.repeat(row[:, 0], chunk), jnp.tile(step[0], batch))
    chain = jnp.broadcast_to(jnp.maximum(step - 1, 0), (batch, chunk))
    count = jnp.clip(target - cache.length, 0, chunk)
    real, position = step < count[:, None], cache.length[:, None] + step
    token = jnp.where(real, tokens[row, position + network.ahead], 0)
    given = None if features is None else jnp.moveaxis(
        jnp.where(real[..., None], features[row, position], 0), -1, 0)
    fresh: KV = []

    def look(index: Any, q: Array, k: Array, v: Array) -> Array:
        fresh.append((k, v))
        new = (k.transpose(2, 3, 0, 1), v.transpose(2, 3, 0, 1))
        return attend(q, packed, new, chain, cache, index, cache.length)

    out = network.run(params, token, given, position, look)
    # Only finite numbers are cached, because attention multiplies what it masks by 0. This also
    # makes the write wait for the attention that reads the cache; otherwise XLA copies the cache.
    sound = jnp.isfinite(out).all(0)[None, None]
    fresh = [(jnp.where(sound, k, 0), jnp.where(sound, v, 0)) for k, v in fresh]
    newest = jnp.maximum(count - 1, 0)

    def keep_newest(old: Array, new: Array) -> Array:
        """Returns f[B, ...] of new [B, chunk, ...] where a position was processed."""
        at, some = (x.reshape(-1, *(1,) * (new.ndim - 1)) for x in (newest, count > 0))
        picked = jnp.take_along_axis(new, at, 1)[:, 0].astype(old.dtype)
        return jnp.where(some[:, 0], picked, old)

    by_row: KV = [(k.transpose(2, 3, 0, 1), v.transpose(2, 3, 0, 1)) for k, v in fresh]
    return cache.replace(
        kv=_append(cache, fresh, count), length=cache.length + count,
        hidden=keep_newest(cache.hidden, jnp.moveaxis(out, 0, -1)),
        last=jax.tree.map(keep_newest, cache.last, by_row))
