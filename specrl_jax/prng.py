"""Keys and noise as functions of indices, so that no generator state passes through a loop."""

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels.noise import bits, exponential, gumbel

__all__ = ["STREAMS", "bits", "exponential", "gumbel", "row_keys"]

STREAMS = ("train", "eval", "generate", "probe")


def row_keys(seed: int, stream: str, step: int, prompt_id: np.ndarray, occurrence: np.ndarray,
             sample_id: np.ndarray) -> np.ndarray:
    """Returns the noise key of each sequence, u32[Q, 2].

    Args:
      seed: the run's.
      stream: one of STREAMS, the purpose of the tokens.
      step: RL step in which the sequence begins.
      prompt_id: i32[Q].
      occurrence: i32[Q] earlier occurrences of the prompt in this step.
      sample_id: i32[Q] index within the prompt's group.
    """
    words = np.stack([prompt_id, occurrence, sample_id], axis=-1).astype(np.uint32)
    return np.asarray(_fold(jax.random.key(seed, impl="threefry2x32"),
                            jnp.uint32(STREAMS.index(stream)), jnp.uint32(step), words))


@jax.jit
def _fold(key: jax.Array, stream: jax.Array, step: jax.Array, words: jax.Array) -> jax.Array:
    of_step = jax.random.fold_in(jax.random.fold_in(key, stream), step)
    fold = jax.vmap(lambda w: jax.random.key_data(
        jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(of_step, w[0]), w[1]), w[2])))
    return fold(words)
