"""Shapes of a rollout's state, requests, and where each array lies on the mesh."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from specrl_jax.config import RolloutConfig, check
from specrl_jax.control import acceptance
from specrl_jax.control.acceptance import Acceptance
from specrl_jax.draft.cached import split_heads
from specrl_jax.draft.protocol import RolloutInfo
from specrl_jax.model import cache
from specrl_jax.rollout import record
from specrl_jax.rollout.plan import Decoder
from specrl_jax.sharding import ROWS
from specrl_jax.structs import (
    Cache,
    Counters,
    KVCache,
    PyTree,
    Records,
    RolloutState,
    Sampling,
    Sequences,
    carrier,
)

FEED, FED = 32, 256  # tokens of a row, and of all rows of a shard, that one program appends
PROMPTS = (1, 4, 16, 64, 256)  # prompts of one compiled prefill, besides those that fill all slots
ROW = P(ROWS)


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
    feed: int = 0  # C, tokens of a row that one program appends; 0 if no sequence is ever begun

    @property
    def longest(self) -> int:
        """Most tokens that a live row has cached."""
        return self.prompt + self.response - 1

    @property
    def fed(self) -> int:
        """W, tokens of all rows that one program appends."""
        return min(self.batch * self.feed, FED)

    @property
    def cache(self) -> int:
        """S. XLA moves an update that does not fit, instead of cutting it: one's room is free."""
        least = self.prompt + self.response + max(self.depth + 1, self.feed)
        return -(-least // cache.SEGMENT) * cache.SEGMENT

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that rows are compacted to, largest first: halves, and 3/4 of large ones.

        The time of a forward pass is proportional to its tokens from about 32 of them on, and
        nearly constant below.
        """
        sizes, whole = [self.batch], self.batch
        while whole > 1 and -(-whole // 2) >= self.min_batch:
            half = -(-whole // 2)
            sizes += [-(-3 * whole // 4), half] if half >= 16 else [half]
            whole = half
        return tuple(sizes)

    def smaller(self, batch: int) -> int:
        """Returns the next smaller one of `batches`; 0 if there is none."""
        at = self.batches.index(batch) + 1
        return (*self.batches, 0)[at]

    @property
    def prefills(self) -> tuple[tuple[int, int], ...]:
        """(prompts, P') of the compiled prefills, smallest first. Short prompts have one width:
        compiling another takes seconds and saves milliseconds a rollout."""
        most = -(-self.batch // self.group)
        prompts = sorted({most, *itertools.takewhile(lambda p: p < most, PROMPTS)})
        widths = (self.prompt // 2, self.prompt) if self.prompt >= 128 else (self.prompt,)
        return tuple((p, w) for p in prompts for w in widths)


@dataclasses.dataclass
class RolloutRequest:
    """The sequences of one rollout, of all shards; samples of a prompt lie together."""

    prompts: Sequence[Sequence[int]]  # token ids of Q / M prompts
    keys: np.ndarray  # u32[Q, 2]
    temperature: np.ndarray  # f32[Q]
    top_p: np.ndarray  # f32[Q]
    top_k: np.ndarray  # i32[Q]
    limit: np.ndarray  # i32[Q] most response tokens; a sequence that has as many is done
    past: np.ndarray | None = None  # i32[Q / M, K, T] earlier responses; -1 is padding
    begun: Sequences | None = None  # what sequences have already, as host arrays

    @property
    def length(self) -> np.ndarray:
        """i32[Q] response tokens that sequences have already."""
        return np.asarray(0 * self.limit if self.begun is None else self.begun.length)

    @property
    def done(self) -> np.ndarray:
        """bool[Q] sequences that get no more tokens."""
        return np.asarray(self.length >= self.limit)


def make_request(
    prompts: Sequence[Sequence[int]],
    keys: np.ndarray,
    group: int,
    config: RolloutConfig,
    past: np.ndarray | None = None,
) -> RolloutRequest:
    """Returns a request in which all sequences are sampled with the parameters of `config`."""
    total = len(prompts) * group
    return RolloutRequest(
        prompts=prompts, keys=keys, past=past,
        temperature=np.full(total, config.temperature, np.float32),
        top_p=np.full(total, config.top_p, np.float32),
        top_k=np.full(total, config.top_k, np.int32),
        limit=np.full(total, config.max_new_tokens, np.int32))


class Layout:
    """States of one engine: as host arrays, as abstract shapes, and their shardings.

    Attributes:
      specs: how a state is split over the data axes; `tensor` also splits the cache's heads.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh, shapes: Shapes, stop: Sequence[int],
                 dtype: DTypeLike, past: int, platform: str) -> None:
        self.decoder, self.mesh, self.shapes = decoder, mesh, shapes
        self.stop = np.asarray(stop or (-1,), np.int32)
        self.dtype, self.past, self.platform = dtype, past, platform
        sampling = carrier(Sampling, temperature=ROW, top_p=ROW, top_k=ROW, limit=ROW, key=ROW,
                           stop=P())
        self.specs = carrier(
            RolloutState, cache=carrier(Cache, kv=self._kv(shapes.batch).split, length=ROW),
            root=ROW, seq=ROW, sampling=sampling, sequences=ROW, draft=ROW, control=P(),
            expected=ROW, estimate=P(), seen=ROW, counters=ROW, records=ROW)

    def check(self, request: RolloutRequest) -> None:
        """Checks that a request fits.

        Raises:
          ConfigError: it does not.
        """
        s = self.shapes
        longest = max(len(p) for p in request.prompts)
        check(len(request.prompts) * s.group == s.sequences * s.shards, "prompts",
              len(request.prompts), f"this engine takes {s.sequences * s.shards // s.group}")
        check(longest <= s.prompt, "rollout.max_prompt_tokens", s.prompt,
              f"a prompt has {longest} tokens; raise it")
        check(min(len(p) for p in request.prompts) > 0, "prompt", [], "needs at least one token")
        truncated = ((request.top_k > 0) | (request.top_p < 1)).any()
        check(self.decoder.truncates or not truncated, "truncates", self.decoder.truncates,
              "sequences ask for top_k or top_p, for which this engine was not compiled; set it in "
              "its Decoder")
        check(int(request.limit.max()) <= s.response, "limit", int(request.limit.max()),
              f"the response buffer has rollout.max_new_tokens = {s.response} tokens")

    def abstract(self, batch: int) -> RolloutState:
        """Returns shapes, dtypes and shardings of a state with `batch` slots a shard."""
        state = self.host_state(self.blank_request(), batch)
        like = jax.tree.map(lambda s, a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                            self.shardings(state), state)
        return like.replace(cache=like.cache.replace(kv=self.abstract_kv(batch)))

    def blank_request(self) -> RolloutRequest:
        """Returns a request of the engine's size whose prompts have one token."""
        s = self.shapes
        total = s.sequences * s.shards
        return make_request([[0]] * (total // s.group),
                            np.arange(2 * total, dtype=np.uint32).reshape(total, 2), s.group,
                            RolloutConfig(max_new_tokens=s.response))

    def abstract_kv(self, batch: int) -> KVCache:
        """Returns shapes, dtypes and shardings of the cache of `batch` slots a shard."""
        kv, heads = self._kv(batch), self.decoder.arch.num_kv_heads
        tensor = "tensor" if heads % self.mesh.shape["tensor"] == 0 else None
        place = NamedSharding(self.mesh, P(*kv.split, tensor))
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), kv)

    def _kv(self, batch: int) -> KVCache:
        return cache.shapes(self.platform, self.decoder.arch, batch * self.shapes.shards,
                            self.shapes.cache, self.dtype)

    def shardings(self, state: RolloutState) -> RolloutState:
        """Returns a NamedSharding for each leaf of a state."""
        shardings = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(self.mesh, spec), part),
            self.specs, state, is_leaf=lambda x: isinstance(x, P))
        return shardings.replace(draft=split_heads(state.draft, shardings.draft, self.mesh))

    def of_results(self, shapes: PyTree, specs: PyTree) -> PyTree:
        """Returns shardings of a program's results: `abstract`'s for a state, else `specs`."""
        if isinstance(shapes, RolloutState):
            batch = shapes.root.shape[0] // self.shapes.shards
            return jax.tree.map(lambda a: a.sharding, self.abstract(batch))
        if isinstance(shapes, tuple) and isinstance(specs, tuple) and not isinstance(specs, P):
            return tuple(map(self.of_results, shapes, specs))
        return jax.tree.map(lambda _: NamedSharding(self.mesh, specs), shapes)

    def host_state(self, request: RolloutRequest, batch: int) -> RolloutState:
        """Returns the state in which every slot is empty, as host arrays, without the cache's K/V
        and the controller's state."""
        s = self.shapes
        rows, total = batch * s.shards, s.sequences * s.shards
        zero = functools.partial(np.zeros, dtype=np.int32)
        begun = blank_sequences(total, s.response) if request.begun is None else request.begun
        sequences = begun.replace(done=request.done, said=self._said(request))
        written = np.arange(s.response)[None] < begun.length[:, None]
        prompt, prompt_length = pad(request.prompts, s.prompt)
        past = request.past
        if past is None:
            past = np.full((len(request.prompts), self.past, s.response), -1, np.int32)
        info = RolloutInfo(prompt=prompt, prompt_length=prompt_length, past=past,
                           response=np.where(written, begun.tokens, -1), batch=rows,
                           group=s.group, buffer=s.response, cache=s.cache,
                           platform=self.platform)
        sampling = carrier(
            Sampling, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
            limit=request.limit, key=request.keys, stop=self.stop)
        outcomes = np.zeros((s.shards, *self.cells), np.float32)
        counters = {f.name: zero((s.shards, self.cells[0]) if f.name in ("accepted", "drafted")
                                 else s.shards) for f in dataclasses.fields(Counters)}
        return carrier(
            RolloutState, cache=carrier(Cache, kv=(), length=zero(rows)), root=zero(rows),
            seq=np.full(rows, s.sequences, np.int32), sampling=sampling, sequences=sequences,
            draft=self.decoder.drafter.init(info), control=(),
            expected=request.limit.astype(np.float32),
            estimate=np.zeros(self.cells, np.float32),
            seen=carrier(Acceptance, tried=outcomes, hit=outcomes),
            counters=carrier(Counters, **counters), records=self._records())

    def _records(self) -> Records | None:
        s, decoder = self.shapes, self.decoder
        if decoder.recorded is None:
            return None
        return record.blank(s.sequences * s.shards, s.prompt + s.response, s.response,
                            (len(decoder.drafter.taps) + 1) * decoder.arch.hidden_size, s.depth,
                            self.dtype)

    def _said(self, request: RolloutRequest) -> np.ndarray | None:
        """Returns the tokens of each sequence's prompt, bool[Q, V], if repetition costs."""
        if self.decoder.repetition_penalty == 1:
            return None
        said = np.zeros((len(request.prompts), self.decoder.arch.vocab_size), bool)
        for row, prompt in zip(said, request.prompts, strict=True):
            row[list(prompt)] = True
        return np.repeat(said, self.shapes.group, 0)

    @property
    def cells(self) -> tuple[int, int, int]:
        """(drafters, D, bins) of the acceptance estimate."""
        drafter = self.decoder.drafter
        drafters, depth, bins = acceptance.blank(len(drafter.names), drafter.depth).tried.shape
        return drafters, depth, bins


def blank_sequences(total: int, buffer: int) -> Sequences:
    """Returns sequences without a token, as host arrays: Q = `total`, T = `buffer`."""
    def tokens(dtype: DTypeLike) -> np.ndarray:
        return np.zeros((total, buffer), dtype)

    zero = np.zeros(total, np.int32)
    return carrier(
        Sequences, tokens=tokens(np.int32), logprob=tokens(np.float32),
        raw_logprob=tokens(np.float32), top_p_mass=tokens(np.float32), commits=tokens(np.int32),
        length=zero, rounds=zero, done=zero > 0)


def pad(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns i32[rows, width], right-padded with 0, and the lengths i32[rows]."""
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out, np.asarray([len(row) for row in rows], np.int32)
