"""The drafter protocol: a record of pure functions over an opaque state.

They are called in this order: `init` on the host when a rollout begins, `prefill` when slots are
filled, then in each round `propose` before and `observe` after verification; `take` and `reset`
follow the batch's rows. A drafter's state is per data shard. Parameters are passed in, because they
change while training runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from specrl_jax.structs import Array, DraftTree, Path, SpecConfig, Tip, Verdict

Survive = Callable[[Array, Array, Array, Array, Array], Array]
"""(parent's survival, gap f32[...], depth, rank, origin i32[...]) -> survival f32[...]"""

Noise = Callable[[Array, Array], Array]
"""(token index i32[B], vocabulary ids i32[v]) -> Gumbel noise f32[B, v] of each row."""


class Propose(Protocol):
    def __call__(self, params: Any, state: Any, tip: Tip, spec: SpecConfig, noise: Noise,
                 survive: Survive) -> tuple[DraftTree, Any]: ...


class Occasion(NamedTuple):
    """What a drafter may know when a rollout begins: host arrays over all data shards."""

    prompt: np.ndarray  # i32[Q / M, P] right-padded
    prompt_length: np.ndarray  # i32[Q / M]
    past: np.ndarray  # i32[Q / M, K, T] earlier responses, most recent first; -1 fills
    batch: int  # slots of all shards
    group: int  # M
    buffer: int  # T


class Drafter(NamedTuple):
    """See the module's docstring. `nodes` is N and `depth` D: the shapes `propose` returns."""

    nodes: int
    depth: int
    init: Callable[[Occasion], Any]  # -> state, as host arrays; leading axes are split over shards
    prefill: Callable[[Any, Any, Array, Any], Any]  # (params, state, tokens, taps) -> state
    propose: Propose
    observe: Callable[[Any, Any, Tip, Verdict, Path], Any]  # -> state
    take: Callable[[Any, Array], Any]  # (state, rows i32[B']) -> state
    reset: Callable[[Any, Array], Any]  # (state, rows bool[B]) -> state
