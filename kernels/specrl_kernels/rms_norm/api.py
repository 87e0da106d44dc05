"""The signature of norms of few tokens, and the choice of an implementation."""

import jax
import jax.numpy as jnp

from specrl_kernels import dispatch
from specrl_kernels.machine_code import runtime

_MULTIPLE = 16  # of F, machine_code.emit.LANES


def rms_norm_xla(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """See `rms_norm`."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.square(wide).mean(0, keepdims=True) + eps)
    return (wide * scale * weight[:, None]).astype(x.dtype)


def rms_norm_machine(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """See `rms_norm`. A token's bits depend on it alone; XLA's also on how many there are."""
    features, tokens = x.shape
    if {x.dtype, weight.dtype} != {jnp.dtype(jnp.float32)}:
        raise dispatch.Unsupported("float32 only")
    if features % _MULTIPLE or not tokens:
        raise dispatch.Unsupported(f"F = {features}, T = {tokens}: multiples of {_MULTIPLE} only, "
                                   "and one token at least")
    out = jax.ShapeDtypeStruct((tokens, features), jnp.float32)
    return runtime.call("rms_norm", (features, eps), out, x.T, weight).T


IMPLEMENTATIONS = {"machine": rms_norm_machine, "xla": rms_norm_xla}


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, implementation: str | None = None
             ) -> jax.Array:
    """x / sqrt(mean of x^2 + eps) * weight, over the first axis, in float32.

    Not differentiable, and not to be mapped over, unless a named implementation is.

    Args:
      x: f[F, T].
      weight: f[F].

    Returns:
      f[F, T], in x's dtype.

    Raises:
      ValueError: shapes that do not fit, or an unknown implementation.
      Unsupported: a named implementation cannot do this.
    """
    if x.ndim != 2 or weight.shape != x.shape[:1]:
        raise ValueError(f"x, weight = {x.shape}, {weight.shape}, expected [F, T], [F]")
    return dispatch.choose(IMPLEMENTATIONS, implementation)(x, weight, eps=eps)
