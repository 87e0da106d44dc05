"""The rounds that plain decoding would have taken for what a rollout said.

Without drafts every live row says one token a round: rows that say as much end together, and those
that are drafted well do not wait for others to the end. A rollout with drafts has other rows live
in its rounds, so what a round gave tells little of how long the whole would have taken.
"""

from collections.abc import Sequence

import numpy as np

from specrl_jax.control.protocol import Stretch
from specrl_jax.rollout.layout import RolloutRequest, Shapes


def of_rollout(shapes: Shapes, asked: RolloutRequest, length: np.ndarray) -> list[Stretch]:
    """`plain_rounds` of sequences that became `length` i32[Q] tokens long."""
    prompt = np.repeat([len(p) for p in asked.prompts], shapes.group)
    split = (shapes.shards, shapes.sequences)
    return plain_rounds(length.reshape(split), prompt.reshape(split), shapes.batches)


def plain_rounds(length: np.ndarray, prompt: np.ndarray, batches: Sequence[int]) -> list[Stretch]:
    """What Engine.run would have done without drafts, in order.

    Args:
      length: i32[shards, Q] tokens of each sequence; they get slots in this order.
      prompt: i32[shards, Q] tokens of their prompts.
      batches: rows of a shard, largest first.
    """
    queues = [[(n, p) for n, p in zip(*of_shard, strict=True) if n]
              for of_shard in zip(length.tolist(), prompt.tolist(), strict=True)]
    rows: list[list[list[int]]] = [[] for _ in queues]  # [tokens left, context] of live ones
    found = []
    while True:
        for queue, live in zip(queues, rows, strict=True):
            new, queue[:] = queue[: batches[0] - len(live)], queue[batches[0] - len(live):]
            live += [[left, context - 1] for left, context in new]
        most = max(map(len, rows))
        if not most:
            return found
        batch = batches[0] if any(queues) else min(b for b in batches if b >= most)
        rounds = min(left for live in rows for left, _ in live)
        contexts = [at for live in rows for _, at in live]
        context = sum(contexts) / len(contexts) + (rounds - 1) / 2
        found.append(Stretch(batch, rounds, context))
        for live in rows:
            live[:] = [[left - rounds, at + rounds] for left, at in live if left > rounds]
