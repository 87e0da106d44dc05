"""The draw from a head as a product and a perturbed argmax of stored logits."""

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Target
from specrl_kernels.gumbel_argmax import Drawn
from specrl_kernels.gumbel_argmax.xla import gumbel_argmax_xla


def head_argmax_xla(hidden: jax.Array, head: jax.Array, temperature: jax.Array, key: jax.Array,
                    position: jax.Array, *, axis: str | None, target: Target) -> Drawn:
    """See `api.head_argmax`."""
    logits = jnp.tensordot(head, hidden, 1, preferred_element_type=jnp.float32)
    return gumbel_argmax_xla(logits.T, temperature, key, position, None, count=1, axis=axis,
                             target=target)
