"""What drafting asks of a network, and what is static when its trees grow (grow.py)."""

import dataclasses
from collections.abc import Callable
from typing import Any

from specrl_jax.model.transformer import Attend
from specrl_jax.structs import Array

CHILDREN = ("perturbed", "top", "sampled")

KV = list[tuple[Array, Array]]
"""(k [B, G, E, S], v [B, G, S, E]) of each layer; of a tree's nodes, both [B, n, G, E]."""


@dataclasses.dataclass(frozen=True)
class Network:
    """What drafting asks of a network, whose parameters are passed in.

    At position t it reads token t + `ahead`, so its last one before a root stands at the root's
    position less `ahead`.
    """

    run: Callable[[Any, Array, Array | None, Array, Attend], Array]
    """(params, token i32[...], features f[F, ...], position i32[...], attend) -> f[F, ...]; where
    there are none yet, the output at a node's parent stands in for its features"""
    logits: Callable[[Any, Array], Array]  # (params, output f[F, ...]) -> f32[Vd, ...]
    vocab: Callable[[Any], Array]  # params -> i32[Vd] token ids, ascending
    ahead: int


@dataclasses.dataclass(frozen=True)
class Growth:
    """What is static in growing."""

    network: Network
    depth: int  # D
    branch: int  # K
    nodes: int  # N
    children: str  # one of CHILDREN
    origin: int
    temperature: float  # of the drafter, over the row's
    drawn: bool = False  # whether trees carry what their tokens were drawn from, and what of them
    # is kept follows from places alone: a child's guess from its rank, whatever its token is
