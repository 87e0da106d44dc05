"""Earlier responses to each prompt, kept on the host between steps in arrays of a fixed size."""


import numpy as np

from specrl_jax.structs import PyTree

EMPTY = -1
MEGABYTES = 64  # bound on the memory of earlier responses
_ARRAYS = ("tokens", "prompt_id", "step", "next")


def capacity(megabytes: int, buffer: int, prompts: int, past: int) -> int:
    """Returns how many responses [T = `buffer`] fit `megabytes`, at most those that can be of use.

    Prompts are drawn in a new order each epoch, so one may come back only after almost two epochs:
    a ring of two epochs' worth still holds its `past` last responses then.
    """
    return max(1, min(megabytes * 2**20 // (4 * (buffer + 2)), 2 * prompts * past))


class ResponseCache:
    """A ring buffer of responses, each with its prompt id and step; the oldest are overwritten."""

    def __init__(self, rows: int, buffer: int, per_prompt: int, window: int = 0) -> None:
        """`rows` responses fit, T = `buffer`; each is returned for `window` steps, 0 is for ever.

        Of one prompt a step adds the last `per_prompt`: more would drive out those of others.
        """
        self.per_prompt, self.window = per_prompt, window
        self.tokens = np.full((rows, buffer), EMPTY, np.int32)
        self.prompt_id = np.full(rows, EMPTY, np.int32)
        self.step = np.zeros(rows, np.int32)
        self.next = np.zeros((), np.int32)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in _ARRAYS}

    def restore(self, arrays: dict[str, PyTree]) -> None:
        for name in _ARRAYS:
            setattr(self, name, np.array(arrays[name]))

    def add(self, prompt_id: np.ndarray, tokens: np.ndarray, length: np.ndarray, step: int) -> None:
        """Adds a step's responses i32[Q, T] of the given lengths, in order."""
        size = len(self.prompt_id)
        used = [i for one in np.unique(prompt_id)
                for i in np.flatnonzero(prompt_id == one)[-self.per_prompt:]]
        for i in sorted(used)[-size:]:
            at = int(self.next) % size
            self.tokens[at] = EMPTY
            self.tokens[at, : length[i]] = tokens[i, : length[i]]
            self.prompt_id[at], self.step[at] = prompt_id[i], step
            self.next = np.int32((at + 1) % size)

    def past(self, prompt_id: np.ndarray, count: int, step: int) -> np.ndarray:
        """Returns the `count` newest responses of each prompt within the window, newest first,
        i32[prompts, count, T]; EMPTY is padding."""
        size = len(self.prompt_id)
        newest_first = (int(self.next) - 1 - np.arange(size)) % size
        recent = self.step[newest_first] >= (step - self.window if self.window else 0)
        owner = np.where(recent, self.prompt_id[newest_first], EMPTY)
        out = np.full((len(prompt_id), count, self.tokens.shape[1]), EMPTY, np.int32)
        for i, prompt in enumerate(prompt_id):
            found = newest_first[owner == prompt][:count]
            out[i, : len(found)] = self.tokens[found]
        return out
