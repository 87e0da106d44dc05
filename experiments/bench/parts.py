"""The parts of a round, each jitted apart at the shapes of one bucket and timed alternately.

Apart, a part pays for its own dispatch and cannot be fused with its neighbours, so the parts are an
account of a round to within a few percent; what they leave over is called rest.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from specrl_kernels.gumbel_argmax.xla import CPU_CHUNK
from specrl_kernels.noise import exponential
from specrl_kernels.tree_attention import tree_attention

from specrl_jax import sharding
from specrl_jax.config import MeshConfig
from specrl_jax.control.buckets import Bucket
from specrl_jax.draft.protocol import RolloutInfo
from specrl_jax.model import transformer
from specrl_jax.rollout.plan import Decoder, buckets_of
from specrl_jax.rollout.round import pack
from specrl_jax.structs import (
    Array,
    Cache,
    Frontier,
    Load,
    Path,
    Sampling,
    Sequences,
    Verdict,
)
from specrl_jax.verify import commit, sampling

from .timing import alternate, seconds_of

Part = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Situation:
    """Where a rollout stands when its parts are timed."""

    rows: int  # B
    packed: float  # tokens of a round, padding included, on average
    context: np.ndarray  # i32[B] cached tokens
    prompt: np.ndarray  # i32[B, P]
    past: np.ndarray  # i32[B, K, T]
    segments: tuple[int, ...]  # of the cache
    count: int  # tokens that a row commits


def time_parts(decoder: Decoder, params: Any, at: Situation, repeats: int
               ) -> dict[str, list[float]]:
    """Seconds of each part of one round, once a repeat.

    What depends on the bucket is timed in the two that the mean of packed tokens lies between, and
    weighted so that they give that mean.
    """
    low, high, share = between(buckets(decoder, at), at.packed)
    parts = {("low", name): part for name, part in bucket_parts(decoder, params, at, low).items()}
    if share:
        parts |= {("high", name): part
                  for name, part in bucket_parts(decoder, params, at, high).items()}
    parts |= {("both", name): part for name, part in common_parts(decoder, params, at).items()}
    tasks = {name: (lambda part=part: seconds_of(part, jax.block_until_ready))
             for name, part in parts.items()}
    alternate(tasks, 1)  # compiles
    weight = {"low": 1 - share, "high": share, "both": 1.0}
    total: dict[str, list[float]] = {}
    for (which, name), seconds in alternate(tasks, repeats).items():
        before = total.get(name, [0.0] * repeats)
        total[name] = [x + weight[which] * y for x, y in zip(before, seconds, strict=True)]
    return total


def between(buckets: Sequence[Bucket], packed: float) -> tuple[Bucket, Bucket, float]:
    """The buckets next to `packed` tokens from below and above, and the upper one's share."""
    buckets = list({b.packed: b for b in reversed(buckets)}.values())[::-1]  # plain ones of two
    low = [b for b in buckets if b.packed <= packed][-1:] or buckets[:1]
    high = [b for b in buckets if b.packed >= packed][:1] or buckets[-1:]
    width = high[0].packed - low[0].packed
    return low[0], high[0], (packed - low[0].packed) / width if width else 0.0


def common_parts(decoder: Decoder, params: Any, at: Situation) -> dict[str, Part]:
    """The parts that are the same in every bucket, by name."""
    draft = {"draft": _draft(decoder, at)} if len(buckets(decoder, at)) > 1 else {}
    return draft | {"commit": commit_part(decoder, at, params)}


def bucket_parts(decoder: Decoder, params: Any, at: Situation, bucket: Bucket) -> dict[str, Part]:
    """The parts of a forward, by name, as functions that return device arrays."""
    even, odd = divmod(bucket.packed, at.rows)
    nodes = even + (jnp.arange(at.rows) < odd)
    live = jnp.arange(bucket.nodes)[None] < nodes[:, None]
    chain = jnp.maximum(jnp.arange(bucket.nodes, dtype=jnp.int32) - 1, 0)
    packing = pack(live, jnp.broadcast_to(chain, live.shape), bucket.packed)
    return {"dense": _dense(decoder, params, packing, at),
            "attention": _attention(decoder, packing, _cache(decoder, at), params),
            "head": _head(decoder, params, bucket.packed),
            "sampling": _sampling(decoder, bucket.packed, params)}


def buckets(decoder: Decoder, at: Situation) -> tuple[Bucket, ...]:
    """The round's; if there is one only, the round drafts nothing."""
    return buckets_of(decoder, at.rows)


def _bound(function: Callable[..., Any], *args: Any) -> Part:
    """A jitted call; arrays are arguments, so that nothing is folded into the program."""
    jitted = jax.jit(function)
    args = jax.tree.map(jnp.asarray, args)
    return lambda: jitted(*args)


def _cache(decoder: Decoder, at: Situation, dtype: Any = jnp.float32) -> Cache:
    arch = decoder.arch
    shape = (at.rows, arch.num_kv_heads)
    kv = [([jnp.ones((*shape, arch.head_dim, s), dtype) for s in at.segments],
           [jnp.ones((*shape, s, arch.head_dim), dtype) for s in at.segments])
          for _ in range(arch.num_layers)]
    return Cache(kv=kv, length=jnp.asarray(at.context))


def _tip(at: Situation) -> Frontier:
    return Frontier(root=jnp.asarray(at.prompt[:, 0]), seq=jnp.arange(at.rows, dtype=jnp.int32),
               generated=jnp.full(at.rows, at.past.shape[2] // 2, jnp.int32),
               context=jnp.asarray(at.context), live=jnp.ones(at.rows, bool))


def _rows(at: Situation) -> Sampling:
    ones, zeros = jnp.ones(at.rows), jnp.zeros(at.rows, jnp.int32)
    return Sampling(temperature=ones, top_p=ones, top_k=zeros, limit=zeros + at.past.shape[2],
                    key=jnp.zeros((at.rows, 2), jnp.uint32), stop=jnp.full(1, -1, jnp.int32))


def _far(at: Situation) -> Any:
    """Tokens that rows have room for."""
    return jnp.full(at.rows, 99, jnp.int32)


def _draft(decoder: Decoder, at: Situation) -> Part:
    """Plan, propose and keep."""
    drafter, controller = decoder.drafter, decoder.controller
    length = np.full(at.rows, at.prompt.shape[1], np.int32)
    state = drafter.init(RolloutInfo(prompt=at.prompt, prompt_length=length, past=at.past,
                                  batch=at.rows, group=1, buffer=at.past.shape[2],
                                  cache=sum(at.segments)))
    ladder = buckets(decoder, at)

    def draft(state: Any, control: Any, frontier: Frontier) -> Any:
        load = Load(live=frontier.live, length=frontier.context, expected_left=jnp.ones(at.rows),
                    room=_far(at), waiting=jnp.int32(0))
        plan = controller.plan(control, load)
        tree, state = drafter.propose((), state, frontier, _rows(at), plan.spec,
                                      lambda parent, draft_prob, depth, origin: parent * draft_prob)
        return controller.keep(control, plan, load, tree, ladder), tree

    return _bound(_alone(draft), state, controller.init(None), _tip(at))


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """On the only shard of a mesh: controllers add up the rows of all shards."""
    return jax.shard_map(function, mesh=sharding.make_mesh(MeshConfig()), in_specs=P(),
                         out_specs=P(), check_vma=False)


def _dense(decoder: Decoder, params: Any, packing: transformer.Packing, at: Situation) -> Part:
    """Embedding and all layers, with attention that returns its queries."""
    arch = decoder.arch

    def dense(params: Any, tokens: Array, position: Array) -> Array:
        rotation = transformer.rotations(arch, position)
        x, fresh = transformer.embed(params, tokens), []
        for index, layer in enumerate(params["layers"]):
            x, kv = transformer.block(arch, layer, index, x, rotation,
                                      lambda i, q, k, v: q, decode=True)
            fresh.append(kv)
        return transformer.rms_norm(x, params["final_norm"], arch.norm_eps), fresh

    position = jnp.asarray(at.context)[packing.row] + packing.node
    return _bound(dense, params, jnp.zeros_like(packing.row), position)


def _attention(decoder: Decoder, packing: transformer.Packing, cache: Cache, params: Any) -> Part:
    """Tree attention of every layer; each layer's output is added to the next one's queries."""
    arch = decoder.arch
    dtype = params["embed"].dtype
    b, n = packing.parent.shape
    q = jnp.ones((packing.row.shape[0], arch.num_heads, arch.head_dim), dtype)
    tree = jnp.ones((b, n, arch.num_kv_heads, arch.head_dim), dtype)

    def attention(q: Array, tree: Array, packing: transformer.Packing, cache: Cache) -> Array:
        for k, v in cache.kv:
            q = q + tree_attention(q, packing.row, packing.node, tree, tree, packing.parent, k, v,
                                   cache.length, scale=arch.head_dim**-0.5,
                                   implementation=decoder.implementation)
        return q

    return _bound(attention, q, tree, packing, cache)


def _head(decoder: Decoder, params: Any, packed: int) -> Part:
    hidden = jnp.ones((decoder.arch.hidden_size, packed), params["embed"].dtype)
    own = {name: params[name] for name in ("embed", "head") if name in params}
    return _bound(
        lambda params, hidden: transformer.logits(decoder.arch, params, hidden, decode=True),
        own,
        hidden,
    )


def _sampling(decoder: Decoder, packed: int, params: Any) -> Part:
    """The draw of every packed node at temperature 1, its noise included."""
    logits = np.random.default_rng(0).standard_normal(
        (decoder.arch.vocab_size, packed), np.float32)
    ones, zeros = jnp.ones(packed), jnp.zeros(packed, jnp.int32)
    truncation = (zeros, ones) if decoder.truncates else (None, None)
    return _bound(sampling.draw, logits, ones, *truncation, jnp.zeros((packed, 2), jnp.uint32),
                  zeros)


def noise_part(vocab: int, packed: int) -> Part:
    """The noise of every packed node alone, which `_sampling` makes too: made, summed, not kept.

    That of 0 tokens is nothing.
    """
    chunk = max(1, min(CPU_CHUNK, vocab))

    def noise(key: Array, position: Array) -> Array:
        def add(total: Array, start: Array) -> tuple[Array, None]:
            return total + exponential(key, position, start + jnp.arange(chunk)).sum(1), None

        return jax.lax.scan(add, jnp.zeros(packed), jnp.arange(0, vocab, chunk))[0]

    return _bound(noise, np.zeros((packed, 2), np.uint32), np.zeros(packed, np.int32))


def commit_part(decoder: Decoder, at: Situation, params: Any) -> Part:
    """Append to the cache and record; the cache is donated and handed on, as in the loop."""
    arch, depth, dtype = decoder.arch, decoder.drafter.depth, params["embed"].dtype
    b, g, e = at.rows, arch.num_kv_heads, arch.head_dim
    width, buffer = depth + 1, at.past.shape[2]
    kv = jnp.ones((width, arch.num_layers, 2, g, e, b), dtype)
    path = Path(kv=kv, taps=None, draw=None, verified=None)
    ints, floats = jnp.zeros((b, width), jnp.int32), jnp.zeros((b, width))
    verdict = Verdict(tokens=ints, logprob=floats, raw_logprob=floats, kept_mass=floats, path=ints,
                      count=jnp.full(b, min(at.count, width), jnp.int32), stopped=ints[:, 0] > 0)
    zeros = [jnp.zeros((b, buffer), jnp.int32) for _ in range(2)]
    rows = [jnp.zeros(b, jnp.int32) for _ in range(2)]
    sequences = Sequences(zeros[0], *(jnp.zeros((b, buffer)) for _ in range(3)), zeros[1], *rows,
                          jnp.zeros(b, bool))

    def step(carry: Any, path: Path, verdict: Verdict, frontier: Frontier, length: Array) -> Any:
        cache, sequences = carry
        cache = commit.append(cache.replace(length=length), path, verdict.count)
        return cache, commit.record(sequences, verdict, frontier)

    jitted = jax.jit(step, donate_argnums=0)
    carry, frontier = (_cache(decoder, at, dtype), sequences), _tip(at)
    length = jnp.asarray(at.context)

    def call() -> Any:
        nonlocal carry
        carry = jitted(carry, path, verdict, frontier, length)
        return carry

    return call
