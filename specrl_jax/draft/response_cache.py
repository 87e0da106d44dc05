"""Earlier responses to each prompt, kept on the host between steps in arrays of a fixed size."""

from typing import Any

import numpy as np
from flax import struct

EMPTY = -1
MEGABYTES = 64  # bound on the memory of earlier responses


def capacity(buffer: int, prompts: int, past: int, megabytes: int = MEGABYTES) -> int:
    """Returns how many responses [T = `buffer`] fit `megabytes`, at most those that can be of use.

    Prompts are drawn in a new order each epoch, so one may come back only after almost two epochs:
    a ring of two epochs' worth still holds its `past` last responses then.
    """
    return max(1, min(megabytes * 2**20 // (4 * (buffer + 2)), 2 * prompts * past))


class ResponseCache(struct.PyTreeNode):
    """A ring buffer of R responses on the host; the oldest are overwritten."""

    tokens: Any  # i32[R, T]; EMPTY is padding
    prompt_id: Any  # i32[R]
    next: Any  # i32[] row of the next response


def blank(rows: int, buffer: int) -> ResponseCache:
    """Returns an empty cache of R = `rows` responses, T = `buffer`."""
    return ResponseCache(
        tokens=np.full((rows, buffer), EMPTY, np.int32), prompt_id=np.full(rows, EMPTY, np.int32),
        next=np.zeros((), np.int32))


def make(buffer: int, prompts: int, past: int) -> ResponseCache:
    """Returns an empty cache for a run of `prompts` prompts, the last `past` responses of each."""
    return blank(capacity(buffer, prompts, past or 1), buffer)


def add(cache: ResponseCache, prompt_id: np.ndarray, tokens: np.ndarray, length: np.ndarray,
        per_prompt: int) -> ResponseCache:
    """Returns the cache with responses i32[Q, T] of the given lengths added, in order.

    Only the last `per_prompt` of a prompt are added: more would drive out those of others.
    """
    rows = len(cache.prompt_id)
    last = sorted(i for one in np.unique(prompt_id)
                  for i in np.flatnonzero(prompt_id == one)[-per_prompt:])[-rows:]
    at = (int(cache.next) + np.arange(len(last))) % rows
    new = ResponseCache(np.array(cache.tokens), np.array(cache.prompt_id),
                        next=np.int32((int(cache.next) + len(last)) % rows))
    real = np.arange(tokens.shape[1]) < length[last][:, None]
    new.tokens[at] = np.where(real, tokens[last], EMPTY)
    new.prompt_id[at] = prompt_id[last]
    return new


def past(cache: ResponseCache, prompt_id: np.ndarray, count: int) -> np.ndarray:
    """Returns the `count` newest responses of each prompt, newest first, i32[prompts, count, T];
    EMPTY is padding."""
    size = len(cache.prompt_id)
    newest_first = (int(cache.next) - 1 - np.arange(size)) % size
    owner = cache.prompt_id[newest_first]
    out = np.full((len(prompt_id), count, cache.tokens.shape[1]), EMPTY, np.int32)
    for i, prompt in enumerate(prompt_id):
        rows = newest_first[owner == prompt][:count]
        out[i, : len(rows)] = cache.tokens[rows]
    return out
