"""The drafter protocol: a record of pure functions over an opaque state.

They are called in this order: `init` on the host when a rollout begins; when slots are filled,
`fork` (prompts copied between slots) and then `prefill` (new prompts); `propose` before a round
that is to draft, and `observe` after the verification of every round; `take` follows the batch's
rows. A drafter that reads the actor names the layers it taps, and `project` makes features of them
inside the actor's own forwards. A drafter's state is per data shard. Parameters are passed in,
because they change while training runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

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

Survive = Callable[[Array, Array, Array, Array], Array]
"""(parents' survival, guess f32[..., siblings], depth, origin i32[...]) -> survival f32[...]: how
likely each node lies on the accepted path; `guess` is what the drafter itself gives a node, once
its parent does. Siblings' sum is the parent's at most."""


class Propose(Protocol):
    def __call__(
        self,
        params: Any,
        state: Any,
        frontier: Frontier,
        rows: Sampling,
        spec: SpecConfig,
        survive: Survive,
    ) -> tuple[DraftTree, Any]: ...


class Prefill(Protocol):
    """Prompts tokens i32[p, P'] and their features f[F, p, P'] enter slots, see Fill.source."""

    def __call__(
        self, state: Any, fill: SlotFill, tokens: Array, features: Array | None
    ) -> Any: ...


class RolloutInfo(NamedTuple):
    """What a drafter may know when a rollout begins: host arrays over all data shards."""

    prompt: np.ndarray  # i32[Q / M, P] right-padded
    prompt_length: np.ndarray  # i32[Q / M]
    past: np.ndarray  # i32[Q / M, K, T] earlier responses, most recent first; -1 fills
    batch: int  # slots of all shards
    group: int  # M
    buffer: int  # T
    cache: int  # S


class Drafter(NamedTuple):
    """See the module's docstring. `nodes` is N and `depth` D: the shapes `propose` returns."""

    nodes: int
    depth: int
    branch: int  # K, most children of a node
    init: Callable[
        [RolloutInfo], Any
    ]  # -> state, as host arrays; leading axes are split over shards
    propose: Propose
    observe: Callable[[Any, Any, Frontier, Verdict, Path], Any]  # -> state
    take: Callable[[Any, Array], Any]  # (state, rows i32[B']) -> state
    fork: Callable[[Any, SlotFill], Any] = lambda state, fill: state
    # On the host, to measure rounds: the state as if it had read i32[B] positions and the round
    # before had committed one more. Arrays that come back as they are say that it reads nothing.
    read_to: Callable[[Any, np.ndarray], Any] = lambda state, context: state
    prefill: Prefill = lambda state, fill, tokens, features: state
    names: tuple[str, ...] = ("draft",)  # of its origins, for metrics
    bind: Callable[[Any, Any], Any] = lambda actor, own: own  # -> the params of the other fields
    taps: tuple[int, ...] = ()  # layers of the actor, 0-based
    project: Callable[..., Array] | None = None  # (params, f[taps * F, ...], decode) -> f[F, ...]
