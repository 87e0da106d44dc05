"""What a rollout's state looks like: sizes, requests, and where each array lies on the mesh."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax.config import RolloutConfig, check
from specrl_jax.control import acceptance
from specrl_jax.control.acceptance import Acceptance
from specrl_jax.draft.protocol import RolloutInfo
from specrl_jax.rollout.plan import Decoder
from specrl_jax.sharding import ROWS
from specrl_jax.structs import Cache, Counters, RolloutState, Sampling, Sequences

SEGMENT = 64  # cache slots come in multiples of this; measured on a CPU
PROMPTS = (1, 4, 16, 64, 256)  # that one prefill may run, and as many as fill all slots
ROW = P(ROWS)
STATE = RolloutState(
    cache=ROW, root=ROW, seq=ROW,
    sampling=Sampling(temperature=ROW, top_p=ROW, top_k=ROW, limit=ROW, key=ROW, stop=P()),
    sequences=ROW, draft=ROW, control=P(), expected=ROW,
    estimate=P(), seen=ROW, counters=ROW)
"""How a state is split over the mesh; `tensor` splits the cache's heads besides."""



@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static sizes of an engine, over one data shard unless said otherwise."""

    batch: int  # B, slots
    sequences: int  # Q
    group: int  # M
    prompt: int  # P
    response: int  # T
    shards: int
    depth: int  # D
    min_batch: int = 1  # smallest batch that rows are compacted to

    @property
    def longest(self) -> int:
        """Tokens that a row may have cached while it is live."""
        return self.prompt + self.response - 1

    @property
    def cache(self) -> int:
        """S; an update that does not fit is moved by XLA, not cut, so D + 1 places stay free."""
        wanted = self.prompt + self.response + self.depth + 1
        return -(-wanted // SEGMENT) * SEGMENT

    @property
    def segments(self) -> tuple[int, ...]:
        """Sizes of the arrays that a layer's cache is made of, S together.

        Attention reads a segment whole or not at all, so each is at most half of what lies before:
        a long cache costs few arrays, and a short context no more than it needs.
        """
        sizes: list[int] = []
        while (left := self.cache - sum(sizes)) > 0:
            sizes.append(min(left, max(SEGMENT, sum(sizes) // 2 // SEGMENT * SEGMENT)))
        return tuple(sizes)

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that rows are compacted to, largest first: halves, and 3/4 of large ones.

        A forward of 32 tokens or more takes about as long as it has tokens; below, hardly.
        """
        sizes, whole = [self.batch], self.batch
        while whole > 1 and -(-whole // 2) >= self.min_batch:
            half = -(-whole // 2)
            sizes += [-(-3 * whole // 4), half] if half >= 16 else [half]
            whole = half
        return tuple(sizes)

    def smaller(self, batch: int) -> int:
        """The next smaller one of `batches`; 0 where there is none."""
        at = self.batches.index(batch) + 1
        return (*self.batches, 0)[at]

    @property
    def prefills(self) -> tuple[tuple[int, int], ...]:
        """(prompts, P') of the compiled prefills, smallest first."""
        most = -(-self.batch // self.group)
        prompts = sorted({most, *itertools.takewhile(lambda p: p < most, PROMPTS)})
        widths = sorted({max(self.prompt // 2, min(self.prompt, 32)), self.prompt})
        return tuple((p, w) for p in prompts for w in widths)


@dataclasses.dataclass
class RolloutRequest:
    """The sequences of one rollout, of all shards; samples of a prompt lie together."""

    prompts: Sequence[Sequence[int]]  # token ids of Q / M prompts
    keys: np.ndarray  # u32[Q, 2]
    temperature: np.ndarray  # f32[Q]
    top_p: np.ndarray  # f32[Q]
    top_k: np.ndarray  # i32[Q]
    limit: np.ndarray  # i32[Q]; 0: not asked for at all, which only a shard's last ones may be
    past: np.ndarray | None = None  # i32[Q / M, K, T] earlier responses for history; -1 fills


def request(prompts: Sequence[Sequence[int]], keys: np.ndarray, group: int, config: RolloutConfig,
            past: np.ndarray | None = None) -> RolloutRequest:
    """A Request in which all sequences are sampled as `config` says."""
    total = len(prompts) * group
    return RolloutRequest(
        prompts=prompts, keys=keys, past=past,
        temperature=np.full(total, config.temperature, np.float32),
        top_p=np.full(total, config.top_p, np.float32),
        top_k=np.full(total, config.top_k, np.int32),
        limit=np.full(total, config.max_new_tokens, np.int32))


class Layout:
    """The states of one engine: as host arrays, as abstract shapes, and their shardings."""

    def __init__(self, decoder: Decoder, mesh: Mesh, shapes: Shapes, stop: Sequence[int],
                 dtype: Any, past: int) -> None:
        self.decoder, self.mesh, self.shapes = decoder, mesh, shapes
        self.stop = np.asarray(stop or (-1,), np.int32)
        self.dtype, self.past = dtype, past

    def check(self, asked: RolloutRequest) -> None:
        """Raises ConfigError if a request does not fit."""
        s = self.shapes
        longest = max(len(p) for p in asked.prompts)
        check(len(asked.prompts) * s.group == s.sequences * s.shards, "prompts",
              len(asked.prompts), f"this engine takes {s.sequences * s.shards // s.group}")
        check(longest <= s.prompt, "rollout.max_prompt_tokens", s.prompt,
              f"a prompt has {longest} tokens; raise it")
        check(min(len(p) for p in asked.prompts) > 0, "prompt", [], "needs at least one token")
        truncated = ((asked.top_k > 0) | (asked.top_p < 1)).any()
        check(self.decoder.truncates or not truncated, "truncates", self.decoder.truncates,
              "sequences ask for top_k or top_p, for which this engine was not compiled; set it in "
              "its Decoder")
        unasked = asked.limit.reshape(s.shards, s.sequences) == 0
        check(bool((np.diff(unasked.astype(np.int8), axis=1) >= 0).all()), "limit", 0,
              "sequences that are not asked for come last in their shard")
        check(int(asked.limit.max()) <= s.response, "limit", int(asked.limit.max()),
              f"the response buffer has rollout.max_new_tokens = {s.response} places")

    def abstract(self, batch: int) -> RolloutState:
        """Shapes, dtypes and shardings of a state with `batch` slots a shard."""
        q = self.shapes.sequences * self.shapes.shards // self.shapes.group
        blank = RolloutRequest(
            prompts=[[0]] * q,
            keys=np.zeros((q * self.shapes.group, 2), np.uint32),
            **{
                name: np.zeros(q * self.shapes.group, kind)
                for name, kind in (
                    ("temperature", np.float32),
                    ("top_p", np.float32),
                    ("top_k", np.int32),
                    ("limit", np.int32),
                )
            },
        )
        state = self.host_state(blank, batch)
        like = jax.tree.map(lambda s, a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                            self.shardings(state), state)
        return like.replace(cache=like.cache.replace(kv=self.abstract_kv(batch)))

    def abstract_kv(self, batch: int) -> list[tuple[list[Any], list[Any]]]:
        arch, rows = self.decoder.arch, batch * self.shapes.shards
        g, e = arch.num_kv_heads, arch.head_dim
        tensor = "tensor" if g % self.mesh.shape["tensor"] == 0 else None
        place = NamedSharding(self.mesh, P(ROWS, tensor))

        def part(*rest: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, g, *rest), self.dtype, sharding=place)

        sizes = self.shapes.segments
        return [([part(e, s) for s in sizes], [part(s, e) for s in sizes])] * arch.num_layers

    def shardings(self, state: RolloutState) -> RolloutState:
        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(self.mesh, spec), part),
            STATE, state, is_leaf=lambda x: isinstance(x, P))

    def of_results(self, shapes: Any, specs: Any) -> Any:
        """Shardings of a program's results: of a state as `abstract` says, of the rest by specs."""
        if isinstance(shapes, RolloutState):
            batch = shapes.root.shape[0] // self.shapes.shards
            return jax.tree.map(lambda a: a.sharding, self.abstract(batch))
        if isinstance(shapes, tuple) and isinstance(specs, tuple) and not isinstance(specs, P):
            return tuple(map(self.of_results, shapes, specs))
        return jax.tree.map(lambda _: NamedSharding(self.mesh, specs), shapes)

    def host_state(self, asked: RolloutRequest, batch: int) -> RolloutState:
        """The state in which every slot is empty, as host arrays; the cache's K/V and the
        controller's state are not here."""
        s = self.shapes
        rows, total = batch * s.shards, s.sequences * s.shards
        zero = functools.partial(np.zeros, dtype=np.int32)
        floats = [np.zeros((total, s.response), np.float32) for _ in range(3)]
        sequences = Sequences(zero((total, s.response)), *floats, zero((total, s.response)),
                              zero(total), zero(total), asked.limit == 0)
        prompt, prompt_length = pad(asked.prompts, s.prompt)
        past = asked.past
        if past is None:
            past = np.full((len(asked.prompts), self.past, s.response), -1, np.int32)
        info = RolloutInfo(prompt=prompt, prompt_length=prompt_length, past=past, batch=rows,
                            group=s.group, buffer=s.response, cache=s.cache)
        return RolloutState(
            cache=Cache(kv=(), length=zero(rows)), root=zero(rows),
            seq=np.full(rows, s.sequences, np.int32),
            sampling=Sampling(temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k,
                              limit=asked.limit, key=asked.keys, stop=self.stop),
            sequences=sequences, draft=self.decoder.drafter.init(info), control=(),
            expected=asked.limit.astype(np.float32),
            estimate=np.zeros(self.cells, np.float32),
            seen=Acceptance(*(np.zeros((s.shards, *self.cells), np.float32),) * 2),
            counters=Counters(**{
                f.name: zero((s.shards, self.cells[0]) if f.name in ("accepted", "drafted")
                             else s.shards) for f in dataclasses.fields(Counters)}))

    @property
    def cells(self) -> tuple[int, int, int]:
        """(drafters, D, bins) of the acceptance estimate."""
        return acceptance.blank(len(self.decoder.drafter.names),
                                self.decoder.drafter.depth).tried.shape


def pad(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """i32[rows, width] right-padded with 0, and lengths i32[rows]."""
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out, np.asarray([len(row) for row in rows], np.int32)
