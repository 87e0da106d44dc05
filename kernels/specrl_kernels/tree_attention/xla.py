"""Tree attention in plain XLA operations, for any device.

An accelerator multiplies all slots where they lie: it would wait for the host, or for itself, at
each loop and branch. A CPU reads the committed prefix in chunks, each row's as far as its own
length, one row after the other, whose threads share a chunk's products. A product wants its
operands as arrays of their own, so chunks are copied, out of the cache rows that `slot` names. A
short segment in the rows' own order is multiplied where it lies instead, and skipped where no
context reaches it (experiments/LOG.md has the times).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Target, Unsupported, configured
from specrl_kernels.tree_attention import shared_prefix, softmax
from specrl_kernels.tree_attention.operands import Context, Operands, Prefix
from specrl_kernels.tree_attention.packing import packed_index
from specrl_kernels.tree_attention.softmax import FLOOR, HIDDEN, Partial


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; none changes the result beyond rounding."""

    chunk: int  # slots of context read at a time
    abreast: int  # 1: a chunk of each row at a time; 0: one row after the other
    in_place: int  # slots up to which a segment is read where it lies; never through `slot`
    skip: int  # 1: such a segment is skipped, by a branch, where no row sees any of it
    narrow: int  # 1: weights are rounded to the values' dtype


def tree_attention_xla(operands: Operands, *, scale: float, window: int | None, target: Target
                       ) -> jax.Array:
    """See `api.tree_attention`."""
    q, row, node, tree_k, tree_v, parent, cache_k, cache_v, length, slot, prefix, _ = operands
    config = _config(target, q.dtype)
    b, n, g, e = tree_k.shape
    w, h, _ = q.shape
    queries = q if row is None or node is None else _unpack(q, row, node, b, n)
    queries = queries.reshape(b, n, g, h // g, e)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(b, g, n * (h // g), e) * scale
    ancestry = ancestors(parent)  # [B, n, n]
    depth = ancestry.sum(-1, dtype=jnp.int32) - 1  # [B, n]
    first = None if window is None else jnp.repeat(
        length[:, None] + depth - window + 1, h // g, 1)
    live = jnp.ones(b, bool) if row is None else (
        row[None] == jnp.arange(b, dtype=jnp.int32)[:, None]).any(1)
    partial = _tree_part(queries, tree_k, tree_v, ancestry, depth, window, config)
    context = Context(cache_k, cache_v, jnp.where(live, length, 0), slot)
    partial = _add_context(partial, queries, context, first, config)
    if prefix is not None:
        shared = _shared_part(queries, prefix, live, first, config)
        partial = softmax.combine(softmax.stack([partial, shared]))
    out = softmax.finish(partial).astype(q.dtype).reshape(b, g, n, h // g, e)
    in_order = out.swapaxes(1, 2) if row is None else out[row, :, node]
    return in_order.reshape(w, h, e)


def _config(target: Target, dtype: jnp.dtype) -> Config:
    """Returns the given configuration or the platform's; a CPU widens whole bfloat16 operands."""
    here = target.platform == "cpu"
    chosen = {"chunk": 256, "abreast": 0, "skip": 1, "narrow": 0,
              "in_place": 512 if dtype == jnp.float32 else 0}
    if not here:
        chosen = {"chunk": 512, "abreast": 1, "skip": 0, "narrow": 1, "in_place": 1 << 31}
    config = configured(Config, chosen | dict(target.config or {}))
    flags = (config.abreast, config.skip, config.narrow)
    if config.chunk < 1 or set(flags) - {0, 1} or config.in_place < 0:
        raise Unsupported(f"{config}: chunk is at least 1, abreast, skip and narrow 0 or 1, "
                          "in_place at least 0")
    return config


def ancestors(parent: jax.Array) -> jax.Array:
    """Returns bool[B, n, n]: node j is node i or an ancestor of it, by pointer doubling."""
    n = parent.shape[1]
    nodes = jnp.arange(n)
    has_parent = (parent[..., None] == nodes[None, None]) & (nodes > 0)[None, :, None]
    reach = has_parent | jnp.eye(n, dtype=bool)[None]
    for _ in range((n - 1).bit_length()):
        reach = (reach[..., None] & reach[:, None]).any(2)
    return reach


def _unpack(q: jax.Array, row: jax.Array, node: jax.Array, b: int, n: int) -> jax.Array:
    """[B, n, ...] from packed [W, ...]; a node that is not packed repeats query 0."""
    w = q.shape[0]
    if w == 1:
        return jnp.broadcast_to(q[:, None], (b, n, *q.shape[1:]))
    return q[jnp.maximum(packed_index(row, node, b, n), 0)]


def _weighted(equation: str, weight: jax.Array, values: jax.Array, config: Config) -> jax.Array:
    if config.narrow:
        weight = weight.astype(values.dtype)
    return jnp.einsum(equation, weight, values, preferred_element_type=jnp.float32)


def _add_keys(partial: Partial, queries: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array,
              config: Config) -> Partial:
    """Adds keys f[..., G, E, T] and values f[..., G, T, E] to queries f[..., G, Q, E].

    Args:
      visible: bool, [..., 1, 1 or Q, T].
    """
    score = jnp.einsum("...qe,...es->...qs", queries, k, preferred_element_type=jnp.float32)
    score = jnp.where(visible, score, HIDDEN)
    top = jnp.maximum(partial.top, score.max(-1, keepdims=True))
    rescale, weight = jnp.exp(partial.top - top), jnp.exp(score - top)
    fresh = _weighted("...qs,...se->...qe", weight, v, config)
    return Partial(top, partial.total * rescale + weight.sum(-1, keepdims=True),
                   partial.out * rescale + fresh)


def _tree_part(queries: jax.Array, tree_k: jax.Array, tree_v: jax.Array, ancestry: jax.Array,
               depth: jax.Array, window: int | None, config: Config) -> Partial:
    if window is not None:
        ancestry &= depth[:, None, :] > depth[:, :, None] - window
    visible = jnp.repeat(ancestry, queries.shape[2] // tree_k.shape[1], axis=1)[:, None]
    score = jnp.einsum("bgqe,bmge->bgqm", queries, tree_k, preferred_element_type=jnp.float32)
    score = jnp.where(visible, score, HIDDEN)
    top = score.max(-1, keepdims=True)
    weight = jnp.exp(score - top)
    out = _weighted("bgqm,bmge->bgqe", weight, tree_v, config)
    return Partial(top, weight.sum(-1, keepdims=True), out)


class _Segment(NamedTuple):
    """An array of the cache whose first slot is slot `start` of the context."""

    k: jax.Array  # f[slots, G, E, S]
    v: jax.Array  # f[slots, G, S, E]
    start: int
    size: int  # S


def _add_context(partial: Partial, queries: jax.Array, context: Context, first: jax.Array | None,
                 config: Config) -> Partial:
    """Adds the slots from `first` i32[B, Q] (None: 0) up to `length`, which is 0 for dead rows."""
    length, start = context.length, 0
    oldest = jnp.zeros_like(length) if first is None else first.min(1)
    for k, v in zip(context.k, context.v, strict=True):
        segment = _Segment(k, v, start, k.shape[3])
        if context.slot is None and segment.size <= config.in_place:
            read = functools.partial(_add_segment, queries, segment, length, first, config)
            seen = (length > jnp.maximum(start, oldest)) & (oldest < start + segment.size)
            partial = (jax.lax.cond(seen.any(), read, lambda same: same, partial) if config.skip
                       else read(partial))
        else:
            partial = _add_chunks(partial, queries, segment, context, first, config)
        start += segment.size
    return partial


def _add_segment(queries: jax.Array, segment: _Segment, length: jax.Array,
                 first: jax.Array | None, config: Config, partial: Partial) -> Partial:
    """Adds all of a segment."""
    own = segment.start + jnp.arange(segment.size)
    visible = (own[None] < length[:, None])[:, None, None]
    if first is not None:
        visible &= (own[None, None] >= first[..., None])[:, None]
    return _add_keys(partial, queries, segment.k, segment.v, visible, config)


def _add_chunks(partial: Partial, queries: jax.Array, segment: _Segment, context: Context,
                first: jax.Array | None, config: Config) -> Partial:
    """Adds the chunks of a segment that each row sees some of; the last ends where it does."""
    k, v, start, size = segment
    length, chunk = context.length, min(config.chunk, size)
    slot = jnp.arange(length.shape[0]) if context.slot is None else context.slot
    oldest = jnp.zeros_like(length) if first is None else first.min(1)
    begin = jnp.clip(oldest - start, 0, size) // chunk
    end = -(-jnp.clip(length - start, 0, size) // chunk)

    def row(args: tuple) -> Partial:
        partial, queries, slot, length, first, begin, end = args

        def add(i: jax.Array, partial: Partial) -> Partial:
            at = jnp.minimum(i * chunk, size - chunk)
            own = at + jnp.arange(chunk)
            visible = ((own >= i * chunk) & (start + own < length))[None, None]
            if first is not None:
                visible &= (start + own[None] >= first[:, None])[None]
            return _add_keys(partial, queries, _slice(k, slot, 3, at, chunk),
                             _slice(v, slot, 2, at, chunk), visible, config)

        return jax.lax.fori_loop(begin, end, add, partial)

    over_rows = jax.vmap(row) if config.abreast else functools.partial(jax.lax.map, row)
    return over_rows((partial, queries, slot, length, first, begin, end))


def _slice(x: jax.Array, slot: jax.Array, axis: int, at: jax.Array, size: int) -> jax.Array:
    """Returns row `slot` of a cache, and of its `axis` [at, at + size)."""
    begins, sizes = [slot, 0, 0, 0], [1, *x.shape[1:]]
    begins[axis], sizes[axis] = at, size
    return jax.lax.dynamic_slice(x, begins, sizes)[0]


def _shared_part(queries: jax.Array, prefix: Prefix, live: jax.Array, first: jax.Array | None,
                 config: Config) -> Partial:
    """The shared prefixes, each read once for the queries of all rows that share it."""
    members = prefix.rows
    used = ((members >= 0) & live[jnp.maximum(members, 0)]).any(1)
    if first is not None:
        first = shared_prefix.gather(members, first) + prefix.length[:, None]
    grouped = shared_prefix.gather_heads(members, queries)  # [P, G, M q, E]
    zero = jnp.where(grouped > 0, 0.0, 0.0)  # varies as the queries do, as shard_map wants it
    nothing = Partial(zero[..., :1] + FLOOR, zero[..., :1], zero)
    context = Context((prefix.k,), (prefix.v,), jnp.where(used, prefix.length, 0), None)
    partial = _add_context(nothing, grouped, context, first, config)
    return shared_prefix.scatter(members, partial, queries.shape[0])
