"""The signature of products with few columns, its checks, and the implementations.

XLA's products of 2 to 64 columns on a CPU repack the weights: eight columns take almost twice the
time of one. Machine code reads each weight once, in order, while the next rows are fetched
(experiments/LOG.md).
"""

import jax
import jax.numpy as jnp

from specrl_kernels import dispatch
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.machine_code import runtime

MOST_COLUMNS = 64  # of one piece of code; more are done in turns
_INNER = 16  # K is a multiple of this, machine_code.emit.LANES


def narrow_matmul_machine(w: jax.Array, x: jax.Array) -> jax.Array:
    """See `narrow_matmul`.

    Each output is a sum in one fixed order, whatever the other columns are and however many: an
    output's bits depend on its row of w and its column of x alone.
    """
    (rows, inner), columns = w.shape, x.shape[1]
    if w.dtype != jnp.float32:
        raise Unsupported(f"{w.dtype}: float32 only")
    if columns == 0:
        raise Unsupported("0 columns")
    if inner % _INNER or inner == 0:
        raise Unsupported(f"K = {inner}, no multiple of {_INNER}")
    parts = []
    for start in range(0, columns, MOST_COLUMNS):
        part = x[:, start:start + MOST_COLUMNS].T
        out = jax.ShapeDtypeStruct((rows, part.shape[0]), jnp.float32)
        parts.append(runtime.call("narrow_matmul", (part.shape[0],), out, w, part))
    return jnp.concatenate(parts, 1)


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
