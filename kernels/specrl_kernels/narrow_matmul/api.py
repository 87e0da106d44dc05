"""The signature of products with few columns, its checks, and the choice of an implementation."""

import jax
import jax.numpy as jnp

from specrl_kernels import dispatch
from specrl_kernels.narrow_matmul.machine import narrow_matmul_machine


def narrow_matmul_xla(w: jax.Array, x: jax.Array) -> jax.Array:
    """See `narrow_matmul`."""
    return jnp.dot(w, x, preferred_element_type=jnp.float32)


def narrow_matmul_reference(w: jax.Array, x: jax.Array) -> jax.Array:
    """See `narrow_matmul`."""
    wide = w.astype(jnp.float32)[:, :, None] * x.astype(jnp.float32)[None]
    return wide.sum(1)


IMPLEMENTATIONS = {"machine": narrow_matmul_machine, "xla": narrow_matmul_xla,
                   "reference": narrow_matmul_reference}


def narrow_matmul(w: jax.Array, x: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """w @ x where x has few columns, so that reading w is most of the work.

    Not differentiable, and not to be mapped over, unless a named implementation is.

    Args:
      w: f[O, K], in the order in which memory holds it.
      x: f[K, T], the same dtype.

    Returns:
      f32[O, T].

    Raises:
      ValueError: shapes or dtypes that do not fit, or an unknown implementation.
      Unsupported: a named implementation cannot do this.
      ExceptionGroup: none can; it holds each one's reason.
    """
    if w.ndim != 2 or x.ndim != 2 or w.shape[1] != x.shape[0]:
        raise ValueError(f"w, x = {w.shape}, {x.shape}, expected [O, K], [K, T]")
    if w.dtype != x.dtype:
        raise ValueError(f"x.dtype = {x.dtype}, expected w's, {w.dtype}: cast one of them")
    return dispatch.choose(IMPLEMENTATIONS, implementation)(w, x)
