"""Keys and noise as functions of indices, so that no generator state passes through a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels.noise import bits, exponential, gumbel

__all__ = ["STREAMS", "bits", "exponential", "gumbel", "row_keys"]

STREAMS = ("train", "eval", "generate", "probe")


def row_keys(seed: int, stream: str, step: int | np.ndarray, prompt_id: np.ndarray,
             occurrence: np.ndarray, sample_id: np.ndarray) -> np.ndarray:
    """Returns the noise key of each sequence, u32[Q, 2].

    Args:
      seed: the run's.
      stream: one of STREAMS, the purpose of the tokens.
      step: RL step in which each sequence begins, one or i32[Q].
      prompt_id: i32[Q].
      occurrence: i32[Q] earlier occurrences of the prompt in this step.
      sample_id: i32[Q] index within the prompt's group.
    """
    words = np.stack(np.broadcast_arrays(step, prompt_id, occurrence, sample_id), axis=-1)
    return np.asarray(_fold(jax.random.key(seed, impl="threefry2x32"),
                            jnp.uint32(STREAMS.index(stream)), words.astype(np.uint32)))


@jax.jit
def _fold(key: jax.Array, stream: jax.Array, words: jax.Array) -> jax.Array:
    of_stream = jax.random.fold_in(key, stream)
    fold = jax.vmap(lambda row: jax.random.key_data(
        functools.reduce(jax.random.fold_in, row, of_stream)))
    return fold(words)
