"""What a verification rule is given and returns: a record of one pure function and two flags.

To add a rule, write `verify(nodes, target, depth)` and register it (registry.py). A rule emits at
least one token for every live row, so a rollout ends whatever the drafter proposes.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.structs import Array, Frontier, Proposal, Sampling, Verdict


class Nodes(struct.PyTreeNode):
    """The trees of one bucket. Node 0 is the root; parents come before their children."""

    tokens: Array  # i32[B, n]; siblings hold different tokens
    parent: Array  # i32[B, n]
    depth: Array  # i32[B, n]
    rank: Array  # i32[B, n] position among the siblings, best first
    live: Array  # bool[B, n], closed under parent
    proposal: Proposal | None = None  # fields [B, n, ...]; only for rules with `needs_proposal`


class Head(struct.PyTreeNode):
    """The factors of logits that are not computed apart."""

    hidden: Array  # f[F, W]
    weights: Array  # f[V, F]


class Target(struct.PyTreeNode):
    """The actor's distributions after the nodes, which are packed into W positions."""

    logits: Array | None  # f32[V, W] before temperature and truncation; None: see `head`
    place: Array  # i32[B, n] index in W of each node
    row: Array  # i32[W] row of each position
    position: Array  # i32[W] index of the token drawn after it; 0 is the response's first
    frontier: Frontier
    sampling: Sampling  # of the rows
    truncates: bool = struct.field(pytree_node=False, default=True)  # any row may use top-k, top-p
    min_p: float = struct.field(pytree_node=False, default=0.0)  # of all rows, if `truncates`
    head: Head | None = None  # what makes the logits; only for a rule with `draws_from_head`

    @property
    def processing(self) -> tuple[Array, Array | None, Array | None]:
        """Temperature f32[W], top-k i32[W] and top-p f32[W] of each position."""
        rows = self.sampling
        truncation = (rows.top_k, rows.top_p) if self.truncates else (None, None)
        return jax.tree.map(lambda a: a[self.row], (rows.temperature, *truncation))

    @property
    def key(self) -> Array:
        """u32[W, 2] noise key of each position."""
        return self.sampling.key[self.row]


Verify: TypeAlias = Callable[[Nodes, Target, int], tuple[Verdict, Array]]
"""(nodes, target, D) -> the Verdict, and i32[B, n] the token that was drawn after each node. Only
the tokens after walked nodes are read; `Verdict.path` holds indices of `nodes`."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A verification rule.

    Without `needs_proposal` drafts are tested as point masses, which is exact however the drafter
    chose them and the controller pruned them. With it they are tested as samples of
    `Nodes.proposal`, without replacement among siblings. That is exact only where nothing that
    selects the verified nodes depends on the drawn tokens, so controllers do not see them.
    """

    verify: Verify
    lossless: bool  # every emitted token has the distribution of plain decoding
    needs_proposal: bool = False
    draws_from_head: bool = False
    """The rule can do with `Target.head` instead of logits where nothing is truncated."""


def cut_at_stop(emitted: Array, count: Array, frontier: Frontier, sampling: Sampling
                ) -> tuple[Array, Array]:
    """Cuts the first `count` of `emitted` i32[B, D+1] after a stop token and at the limit.

    Returns i32[B] how many are left, 0 in dead rows, and bool[B] whether the row has ended.
    """
    within = jnp.arange(emitted.shape[1])[None]
    stop = (emitted[..., None] == sampling.stop[None, None]).any(-1) & (within < count[:, None])
    stopped, left = stop.any(1), sampling.limit - frontier.generated
    count = jnp.where(stopped, stop.argmax(1) + 1, count)
    stopped = (stopped & (count <= left)) | (count >= left)
    return jnp.where(frontier.live, jnp.minimum(count, left), 0), stopped & frontier.live
