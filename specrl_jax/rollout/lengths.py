"""How long sequences are expected to become: from what is known of their prompt and of the others.

Known are the lengths of a prompt's earlier responses, of its finished samples, and of all that has
finished in this rollout. A running sequence is compared with those that became longer than it is.
"""

from collections.abc import Callable

import numpy as np

OTHERS = 1.0  # samples of its own prompt that all other prompts' are worth
LIMIT = 0.5  # and that the limit is: what runs on is what nothing is known of yet


def of_past(past: np.ndarray | None, prompts: int) -> np.ndarray:
    """i32[prompts, K] lengths of responses i32[prompts, K, T] that -1 fills; K is 0 for None."""
    return np.zeros((prompts, 0), np.int32) if past is None else (past >= 0).sum(2, dtype=np.int32)


def expected(limit: np.ndarray, length: np.ndarray, done: np.ndarray, past: np.ndarray,
             group: int) -> np.ndarray:
    """Tokens in the end f32[Q].

    Args:
      limit: i32[Q] most tokens; length: i32[Q] so far; done: bool[Q].
      past: i32[Q / M, K] lengths of earlier responses, 0 fills.
      group: M, samples of a prompt, which lie together.
    """
    ended = np.where(done, length, 0).reshape(-1, group)
    ended = np.concatenate([ended, past], 1)
    own = np.repeat(ended, group, 0)  # [Q, M + K], 0 is unknown
    longer = own > length[:, None]
    pool = np.sort(ended[ended > 0]).astype(np.float64)
    total = np.append(np.cumsum(pool[::-1])[::-1], 0.0)
    first = np.searchsorted(pool, length, side="right")
    count = len(pool) - first
    share = np.where(count > 0, OTHERS / np.maximum(count, 1), 0.0)
    mass = np.where(longer, own, 0).sum(1) + share * total[first] + LIMIT * limit
    mean = mass / (longer.sum(1) + share * count + LIMIT)
    return np.where(done, length, np.clip(mean, length + 1, limit)).astype(np.float32)


def weights(weigh: Callable[[np.ndarray], np.ndarray], left: np.ndarray, live: np.ndarray
            ) -> np.ndarray:
    """f32[Q] what `weigh` makes of the tokens left f32[Q] of each shard's live sequences; others 1.

    Args:
      live: bool[shards, Q / shards].
    """
    found, tokens = np.ones_like(left).reshape(live.shape), left.reshape(live.shape)
    for of_shard, its_tokens, its_live in zip(found, tokens, live, strict=True):
        of_shard[its_live] = weigh(its_tokens[its_live])
    return found.reshape(-1)
