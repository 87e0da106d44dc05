"""What growing trees needs of a network, and what is static about it (grow.py)."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from flax import struct
from specrl_kernels.gumbel_argmax import Threshold

from specrl_jax.config import at_least, check
from specrl_jax.model.transformer import Attend
from specrl_jax.structs import Array, DrafterParams

CHILDREN = ("perturbed", "top", "sampled")

KV: TypeAlias = list[tuple[Array, Array]]
"""(k, v) of each layer, both [B, n, G, E] of a tree's nodes."""


class NetworkCache(struct.PyTreeNode):
    """What a network has processed. Positions from `length` on hold garbage and are never read."""

    kv: KV  # of S' positions: k [B, G, E, S'], v [B, G, S', E], or as k if transposed
    length: Array  # i32[B] processed positions
    hidden: Array  # f[B, F] output at the last processed position
    last: KV  # k and v [B, G, E] there
    transposed: bool = struct.field(pytree_node=False)  # as a TPU reads values, see model/cache.py


Truncate: TypeAlias = Callable[[Array, Array, Array, str | None], Threshold]
"""(scores f32[W, Vd], top-k i32[W], top-p f32[W], axis that splits Vd) -> what is kept, as
verify.truncation.threshold finds it."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A drafter's network as functions of its parameters. Position t reads token t + `ahead`."""

    run: Callable[[DrafterParams, Array, Array | None, Array, Attend], Array]
    """(params, token i32[...], features f[F, ...], position i32[...], attend) -> output f[F, ...].
    A draft node has no features; the output at its parent stands in for them."""
    logits: Callable[[DrafterParams, Array], Array]
    """(params, output f[F, ...]) -> f32[Vd, ...]"""
    vocab: Callable[[DrafterParams], Array]
    """params -> i32[Vd] token ids, ascending"""
    vocab_size: int  # Vd
    ahead: int


@dataclasses.dataclass(frozen=True)
class Growth:
    """What is static when trees grow; sizes that cannot work raise a ConfigError."""

    network: Network
    depth: int  # D
    branch: int  # K
    nodes: int  # N
    children: str  # one of CHILDREN, see eagle.eagle
    origin: int  # index of the drafter, for DraftTree.origin
    temperature: float  # of the drafter, over the row's
    drawn: bool = False
    """Trees carry their Proposal. Their shape then follows from ranks and depths alone, and so does
    a node's draft_prob."""
    truncate: Truncate | None = None
    """Drafts are truncated as their rows are; for a vocabulary that is the actor's."""

    def __post_init__(self) -> None:
        check(self.children in CHILDREN, "draft.children", self.children,
              f"choose one of {', '.join(CHILDREN)}")
        at_least(1, spec__max_depth=self.depth)
        at_least(2, spec__max_nodes=self.nodes)
        vocab = self.network.vocab_size
        check(1 <= self.branch <= vocab, "spec.max_branch", self.branch,
              f"must lie in 1..{vocab}, the drafter's vocabulary")
