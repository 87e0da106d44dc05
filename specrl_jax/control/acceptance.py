"""The survival of draft nodes, their cumulative acceptance probability, calibrated online.

`survival(child) = survival(parent) * c`. The drafter guesses c; the estimate learns how often nodes
of such a guess, depth and drafter were the actor's own draw. Only verified nodes whose parent is on
the accepted path count, so the choice of the verified nodes does not bias the estimate.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.sharding import straight_line
from specrl_jax.structs import Array, DraftTree, Frontier, Path, Verdict, carrier

BINS = 12  # of the guess, by its logit
_LOWEST, _HIGHEST = -5.5, 5.5  # logits of the outermost bins' centres
PRIOR = 20.0  # observations that the guess itself is worth


class Acceptance(struct.PyTreeNode):
    """Weights of observed nodes and of accepted ones, by (origin, depth, bin of the guess)."""

    tried: Array  # f32[drafters, D, BINS]
    hit: Array  # f32[drafters, D, BINS]


def blank(drafters: int, depth: int) -> Acceptance:
    """Returns zero counts, as host arrays."""
    zero = np.zeros((max(drafters, 1), max(depth, 1), BINS), np.float32)
    return carrier(Acceptance, tried=zero, hit=zero)


def bin_of(draft_prob: Array) -> Array:
    """Returns the i32 bin of a guess in [0, 1]."""
    draft_prob = jnp.clip(draft_prob, 1e-6, 1 - 1e-6)
    logit = jnp.log(draft_prob) - jnp.log1p(-draft_prob)
    bin_ = (logit - _LOWEST) / (_HIGHEST - _LOWEST) * (BINS - 1)
    return jnp.clip(jnp.round(bin_), 0, BINS - 1).astype(jnp.int32)


def table(known: Acceptance, seen: Acceptance) -> np.ndarray:
    """Returns c of each cell, f32[drafters, D, BINS], never falling as the guess grows.

    On the host. Cells shrink towards the mean of all depths, and that towards the guess.

    Args:
      known: from earlier rollouts; seen: in this one, fields f32[shards, drafters, D, BINS].
    """
    tried, hit = known.tried + seen.tried.sum(0), known.hit + seen.hit.sum(0)
    centre = 1 / (1 + np.exp(-np.linspace(_LOWEST, _HIGHEST, BINS)))
    pooled = (hit.sum(1, keepdims=True) + PRIOR * centre) / (tried.sum(1, keepdims=True) + PRIOR)
    share = (hit + PRIOR * pooled) / (tried + PRIOR)
    return np.maximum.accumulate(share, axis=2).astype(np.float32)


def survive(
    estimate: Array, parent: Array, draft_prob: Array, depth: Array, origin: Array
) -> Array:
    """Returns the survival of nodes, siblings along the last axis. The sum over siblings is at most
    their parent's survival.

    Args:
      estimate: `table`.
      parent: f32[...] the parents' survival.
      draft_prob: f32[...] the drafter's own probability that the node is drawn, given its parent
        is; 0 where there is no node.
    """
    c = estimate[origin, jnp.clip(depth - 1, 0, estimate.shape[1] - 1), bin_of(draft_prob)]
    c = jnp.where(draft_prob > 0, c, 0)
    return parent * c / jnp.maximum(c.sum(-1, keepdims=True), 1.0)


def observe(seen: Acceptance, tree: DraftTree, path: Path, verdict: Verdict, frontier: Frontier
            ) -> Acceptance:
    """Adds one round's outcomes to fields f32[1, drafters, D, BINS]."""
    walked = jnp.arange(verdict.path.shape[1])[None] < verdict.count[:, None]
    nodes = jnp.arange(tree.live.shape[1])
    passed = ((verdict.path[..., None] == nodes.reshape(1, 1, -1)) & walked[..., None]).any(1)
    known = (path.verified & frontier.live[:, None] & (nodes > 0)[None]
             & jnp.take_along_axis(passed, tree.parent, 1))
    hit = known & (jnp.take_along_axis(path.draw, tree.parent, 1) == tree.tokens)
    _, _, depth, bins = seen.tried.shape
    cell = ((tree.origin * depth + jnp.clip(tree.depth - 1, 0, depth - 1)) * bins
            + bin_of(tree.draft_prob)).reshape(-1)

    tried, hits = add_by_cell(jnp.stack([known, hit]).reshape(2, -1).astype(jnp.float32), cell,
                               seen.tried.size)
    return Acceptance(tried=seen.tried + tried.reshape(seen.tried.shape),
                      hit=seen.hit + hits.reshape(seen.hit.shape))


def add_by_cell(values: Array, cell: Array, cells: int) -> Array:
    """Returns f32[n, cells], the sums of values f32[n, m] whose cell i32[m] is the same.

    Accelerators compare instead of scattering: deterministic scatters with repeated indices run in
    a loop.
    """
    if straight_line():
        same = (cell[:, None] == jnp.arange(cells)[None])[None]
        return jnp.where(same, values[:, :, None], 0).sum(1)
    return jnp.zeros((values.shape[0], cells)).at[:, cell].add(values)


def merge(known: Acceptance, seen: Acceptance, keep: float) -> Acceptance:
    """Fades what was known before a rollout by `keep`, and adds the outcomes of all shards."""
    return jax.tree.map(
        lambda old, new: (keep * old + np.asarray(new).sum(0)).astype(np.float32), known, seen)
