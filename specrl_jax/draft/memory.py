"""Earlier responses to each prompt, kept on the host between steps in arrays of a fixed size."""

from typing import Any

import numpy as np

EMPTY = -1


def capacity(megabytes: int, buffer: int, prompts: int, past: int) -> int:
    """Responses that fit the byte bound, and no more than can ever be asked for.

    Prompts are drawn in a new order each epoch, so one may come back only after almost two epochs:
    a ring of two epochs' worth still holds its last responses then.

    Args:
      megabytes: bound on the memory of all responses.
      buffer: T.
      prompts: distinct prompts of the data.
      past: K, responses kept for a prompt.
    """
    return max(1, min(megabytes * 2**20 // (4 * (buffer + 2)), 2 * prompts * past))


class Memory:
    """A ring of responses: the oldest make room. A row is its tokens, length and prompt id."""

    def __init__(self, rows: int, buffer: int) -> None:
        self.tokens = np.full((rows, buffer), EMPTY, np.int32)
        self.prompt_id = np.full(rows, EMPTY, np.int32)
        self.next = np.zeros((), np.int32)

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds."""
        return {"tokens": self.tokens, "prompt_id": self.prompt_id, "next": self.next}

    def restore(self, arrays: dict[str, Any]) -> None:
        self.tokens, self.prompt_id, self.next = (
            np.array(arrays[name]) for name in ("tokens", "prompt_id", "next"))

    def add(self, prompt_id: np.ndarray, tokens: np.ndarray, length: np.ndarray) -> None:
        """Adds responses i32[Q, T] of the given lengths, in order."""
        size = len(self.prompt_id)
        for i in range(max(0, len(prompt_id) - size), len(prompt_id)):
            at = int(self.next) % size
            self.tokens[at] = EMPTY
            self.tokens[at, : length[i]] = tokens[i, : length[i]]
            self.prompt_id[at] = prompt_id[i]
            self.next = np.int32((at + 1) % size)

    def past(self, prompt_id: np.ndarray, count: int) -> np.ndarray:
        """The `count` newest responses of each prompt, newest first: i32[prompts, count, T]."""
        size = len(self.prompt_id)
        newest_first = (int(self.next) - 1 - np.arange(size)) % size
        owner = self.prompt_id[newest_first]
        out = np.full((len(prompt_id), count, self.tokens.shape[1]), EMPTY, np.int32)
        for i, prompt in enumerate(prompt_id):
            found = newest_first[owner == prompt][:count]
            out[i, : len(found)] = self.tokens[found]
        return out
