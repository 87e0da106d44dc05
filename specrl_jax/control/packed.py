"""A controller's state as one array.

Each array that a compiled launch takes or returns costs its call some microseconds, which is much
where a launch takes a few milliseconds; a state has dozens of small ones.
"""

from typing import Any

import jax
import numpy as np

WORD = np.dtype(np.uint32)


class Packing:
    """How states like one are laid out, on the host and on the device alike.

    Args:
      like: a state, whose arrays have entries of four bytes.

    Raises:
      TypeError: one has not.
    """

    def __init__(self, like: Any) -> None:
        leaves, self._tree = jax.tree.flatten(like)
        arrays = [np.asarray(a) for a in leaves]
        for a in arrays:
            if a.dtype.itemsize != WORD.itemsize:
                raise TypeError(f"an array of {a.dtype} in a controller's state: use four bytes")
        self._like = [(a.shape, a.dtype, a.size) for a in arrays]
        self.size = sum(a.size for a in arrays)

    def pack(self, state: Any, xp: Any = np) -> Any:
        """u32[size] of a state on the host, or with jax.numpy for `xp` of one on the device.

        Raises:
          ValueError: the state is not like the one that this was made for.
        """
        words = [xp.zeros(0, WORD)]
        for leaf, (shape, dtype, _) in zip(self._tree.flatten_up_to(state), self._like,
                                           strict=True):
            array = xp.asarray(leaf)
            if (array.shape, array.dtype) != (shape, dtype):
                raise ValueError(f"{array.dtype}{list(array.shape)} in a controller's state that "
                                 f"holds {dtype}{list(shape)} there")
            words.append(array.reshape(-1).view(WORD))
        return xp.concatenate(words)

    def unpack(self, words: Any) -> Any:
        """The state of u32[size], on the host where `words` are there."""
        found, start = [], 0
        for shape, dtype, size in self._like:
            found.append(words[start:start + size].view(dtype).reshape(shape))
            start += size
        return self._tree.unflatten(found)
