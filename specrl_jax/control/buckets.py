"""The buckets of a batch size: how many tokens one verification packs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    """One branch of the round's switch: W packed tokens, at most n nodes a row."""

    packed: int
    nodes: int


BucketTable = Mapping[int, Sequence[Bucket]]
"""The buckets of each batch size of a shard, smallest bucket first."""


def bucket_table(batch: int, nodes: int, max_packed: int, smallest: bool = False
                 ) -> tuple[Bucket, ...]:
    """Returns the buckets of a batch: plain decoding, then doubling up to `max_packed` tokens.

    A forward of 2 to 8 tokens costs about the same, so there is no bucket between 1 and 8. In the
    `smallest` batch size slots stay empty as rows end, so it gets a bucket as wide as plain
    decoding, which verifies drafts in the empty slots.
    """
    packed, widest = [batch], min(batch * nodes, max_packed)
    while packed[-1] < widest:
        packed.append(min(max(2 * packed[-1], 8), widest))
    plain, *wider = (Bucket(w, min(nodes, w - batch + 1)) for w in packed)
    if smallest and wider and wider[0].packed > 8:
        wider.insert(0, Bucket(batch, min(wider[0].nodes, batch)))
    return (plain, *wider)
