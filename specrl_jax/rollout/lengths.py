"""How long sequences are expected to become, from the prompt's earlier responses, its finished
samples, and all other finished sequences that became longer than a running one is."""

import numpy as np

OTHERS = 1.0  # samples of its own prompt that all other prompts' are worth
LIMIT = 0.5  # and that the limit is: what runs on is what nothing is known of yet


def expected_lengths(limit: np.ndarray, length: np.ndarray, done: np.ndarray, past: np.ndarray,
                     group: int) -> np.ndarray:
    """Returns the tokens that each sequence is expected to have in the end, f32[Q].

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
