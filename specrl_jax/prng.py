"""Keys and noise as functions of indices: nothing is threaded through a loop."""

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels.noise import bits, exponential, gumbel

__all__ = ["STREAMS", "bits", "exponential", "gumbel", "row_keys"]

STREAMS = ("train", "eval", "generate", "probe")


def row_keys(seed: int, stream: str, step: int, prompt_id: np.ndarray, occurrence: np.ndarray,
             sample_id: np.ndarray) -> np.ndarray:
    """The noise key of each sequence.

    Args:
      seed: of the run.
      stream: one of STREAMS; what the tokens are for.
      step: the RL step that the sequence is born in.
      prompt_id: i32[Q].
      occurrence: i32[Q] how often the prompt came before in this step.
      sample_id: i32[Q] place in the prompt's group.

    Returns:
      u32[Q, 2].
    """
    words = np.stack([prompt_id, occurrence, sample_id], axis=-1).astype(np.uint32)
    return np.asarray(_fold(jax.random.key(seed, impl="threefry2x32"),
                            jnp.uint32(STREAMS.index(stream)), jnp.uint32(step), words))


@jax.jit
def _fold(key: jax.Array, stream: jax.Array, step: jax.Array, words: jax.Array) -> jax.Array:
    born = jax.random.fold_in(jax.random.fold_in(key, stream), step)
    fold = jax.vmap(lambda w: jax.random.key_data(
        jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(born, w[0]), w[1]), w[2])))
    return fold(words)
