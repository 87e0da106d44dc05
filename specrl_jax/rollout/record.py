"""Records of what verification computes, from which a drafter learns without a forward of its own.

They are kept by sequence, so slots and batch sizes change nothing about them. All functions but
`blank` see one data shard, inside `shard_map`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specrl_jax.model.rows import for_rows
from specrl_jax.structs import (
    Array,
    DraftTree,
    Frontier,
    Path,
    Records,
    SlotFill,
    Verdict,
    carrier,
)

NOT_DRAFTED = -1  # depth of a token before which the drafter drafted nothing


def blank(sequences: int, positions: int, tokens: int, width: int, depth: int, dtype: DTypeLike
          ) -> Records:
    """Returns records in which nothing is recorded, as host arrays. A round writes `depth` + 1
    entries whatever it commits, so there is room for as many beyond the last."""
    states = np.broadcast_to(np.zeros((), dtype), (sequences, positions + depth + 1, width))
    return carrier(Records, states=states, depth=np.full(
        (sequences, tokens + depth + 1), NOT_DRAFTED, np.int32))


def prefill(records: Records, fill: SlotFill, taps: Array | None) -> Records:
    """Records prompts f[A * F, p, P'] of the slots that are prefilled."""
    if taps is None:
        return records
    new = jnp.moveaxis(taps, 0, -1)

    def write(b: Array, at: Array, states: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(new, at, 1, 0).astype(states.dtype)
        return jax.lax.dynamic_update_slice(states, row, (fill.seq[b], 0, 0))

    return records.replace(states=for_rows(fill.source, write, records.states))


def copy_prompt(records: Records, fill: SlotFill, seq: Array, width: int) -> Records:
    """Copies the first `width` positions between sequences; `seq` i32[B] sat in the slots."""
    def write(b: Array, at: Array, states: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(states, seq[at], 1, 0)[:, :width]
        return jax.lax.dynamic_update_slice(states, row, (fill.seq[b], 0, 0))

    return records.replace(states=for_rows(fill.copy, write, records.states))


def add(records: Records, origin: int, tree: DraftTree, frontier: Frontier, verdict: Verdict,
        path: Path) -> Records:
    """Adds a round; `origin` is the drafter that learns.

    It drafted after a node if the node has a child of its own in the tree as it was drafted.
    """
    assert path.states is not None
    states, nodes = path.states, jnp.arange(tree.live.shape[1])
    child = tree.live & (tree.origin == origin) & (nodes > 0)[None]
    drafted = (child[:, None] & (tree.parent[:, None] == nodes[None, :, None])).any(2)
    step = jnp.arange(verdict.path.shape[1], dtype=jnp.int32)[None]
    depth = jnp.where(jnp.take_along_axis(drafted, verdict.path, 1), step, NOT_DRAFTED)

    def write(b: Array, seq: Array, records: Records) -> Records:
        def put(array: Array, new: Array, at: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(new, b, 1, 0).astype(array.dtype)
            return jax.lax.dynamic_update_slice(array, row, (seq, at, *[0] * (array.ndim - 2)))

        return Records(states=put(records.states, states, frontier.context[b]),
                       depth=put(records.depth, depth, frontier.generated[b]))

    return for_rows(jnp.where(verdict.count > 0, frontier.seq, -1), write, records)
