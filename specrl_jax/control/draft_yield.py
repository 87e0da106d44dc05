"""What recent drafts yielded: the tokens to expect of those to come."""

import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.control.acceptance import add_by_cell
from specrl_jax.structs import Array, DraftTree, carrier

BINS = 12  # of survival, two an octave
MEMORY, MEMORY_OF_ROWS = 8.0, 64.0  # rounds that are remembered at least, and rounds times rows
FORGET = 0.99  # of what is remembered of a depth, kept in each round that drafts less deep
PRIOR = 0.7  # survival of a draft, for each step of depth, before any was seen
TRUST_PRIOR, TRUST_MEMORY = 4.0, 0.98  # tokens that the prior is worth; what each round keeps


class DraftYield(struct.PyTreeNode):
    """What drafts of each depth gave a live row, on average over the last rounds that drafted."""

    count: Array  # f32[D, BINS] nodes by survival
    mass: Array  # f32[D, BINS] their survival
    seen: Array  # f32[D] rounds, as far as they are remembered
    expected: Array  # f32[] tokens that survival expected, and
    accepted: Array  # f32[] those accepted, both fading


def prior(depth: int) -> DraftYield:
    """Returns the yield before any draft: one node of each depth, as host arrays."""
    level, zero = PRIOR ** np.arange(1, depth + 1), np.float32(0)
    count = np.zeros((depth, BINS), np.float32)
    count[np.arange(depth), np.asarray(bin_of(jnp.asarray(level)))] = 1
    return carrier(DraftYield, count=count, mass=(count * level[:, None]).astype(np.float32),
                   seen=np.zeros(depth, np.float32), expected=zero, accepted=zero)


def calibration_ratio(yields: DraftYield) -> Array:
    """Returns f32[] accepted tokens per token that survival predicts."""
    return (yields.accepted + TRUST_PRIOR) / (yields.expected + TRUST_PRIOR)


def bin_of(survival: Array) -> Array:
    """Returns the i32 bin, the likeliest first."""
    octaves = -jnp.log2(jnp.maximum(survival, 1e-9))
    return jnp.clip(jnp.floor(2 * octaves), 0, BINS - 1).astype(jnp.int32)


def count_nodes(tree: DraftTree, live: Array, depth: int) -> Array:
    """Returns f32[2, D, BINS] draft nodes of live rows, and their survival."""
    drafted = tree.live & live[:, None] & (tree.depth > 0)
    cell = jnp.clip(tree.depth - 1, 0, depth - 1) * BINS + bin_of(tree.survival)
    values = jnp.stack([drafted.astype(jnp.float32), jnp.where(drafted, tree.survival, 0)])
    total = add_by_cell(values.reshape(2, -1), cell.reshape(-1), depth * BINS)
    return total.reshape(2, depth, BINS)


def update(old: DraftYield, nodes: Array, rows: Array, steps: Array, expected: Array,
           accepted: Array, rounds: Array) -> DraftYield:
    """Moves the depths that were drafted towards the nodes of this round.

    Counts of other depths decay, so that a few later drafts outweigh them. Deeper depths keep their
    proportion to the deepest drafted one. Without recent drafts they survive from it at the rate of
    the depth before, so they are tried again once drafts improve.
    """
    depth = old.count.shape[0]
    level = jnp.arange(1, depth + 1)
    drafted = level <= steps
    long = jnp.maximum(MEMORY, MEMORY_OF_ROWS / jnp.maximum(rows, 1))
    seen = jnp.where(drafted, jnp.minimum(old.seen + 1, long),
                     jnp.where(steps > 0, FORGET, 1.0) * jnp.minimum(old.seen, MEMORY))
    pace = jnp.where(drafted, 1 / jnp.maximum(seen, 1), 0.0)[:, None]
    count, mass = ((1 - pace) * a + pace * new / jnp.maximum(rows, 1)
                   for a, new in ((old.count, nodes[0]), (old.mass, nodes[1])))
    last = jnp.clip(steps - 1, 0, depth - 1)
    ratio = jnp.clip((mass[last].sum() + 1e-3) / (old.mass[last].sum() + 1e-3), 0.25, 4.0)
    before = jnp.where(last > 0, mass[last - 1].sum(), 1.0)
    rate = jnp.clip(mass[last].sum() / jnp.maximum(before, 1e-6), 0.0, 1.0)
    onward = rate ** jnp.maximum(level - 1 - last, 0)
    share = jnp.where(drafted | (steps == 0), 1.0, jnp.minimum(seen, 1.0))[:, None]
    scale = jnp.where(drafted | (steps == 0), 1.0, ratio)[:, None]
    count = share * scale * count + (1 - share) * count[last][None]
    mass = share * scale * mass + (1 - share) * mass[last][None] * onward[:, None]
    kept = TRUST_MEMORY ** rounds
    return DraftYield(count=jnp.minimum(count, 64.0), mass=jnp.minimum(mass, 64.0), seen=seen,
                   expected=kept * old.expected + expected,
                   accepted=kept * old.accepted + jnp.maximum(accepted, 0.0))
