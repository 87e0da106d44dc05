"""Products with few columns on a CPU, by machine code made for that number of columns.

XLA's products of 2 to 64 columns repack the weights: eight columns take almost twice the time of
one. Here each weight is read once, in order, while the next rows are fetched (experiments/LOG.md).

Each output is a sum in one fixed order, whatever the other columns are and however many: an
output's bits depend on its row of w and its column of x alone.
"""

import functools

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Unsupported
from specrl_kernels.machine_code import runtime
from specrl_kernels.machine_code.runtime import Code

MOST_COLUMNS = 64  # of one piece of code; more are done in turns
_INNER = 16  # K is a multiple of this, machine_code.emit.LANES


def narrow_matmul_machine(w: jax.Array, x: jax.Array) -> jax.Array:
    """See `api.narrow_matmul`."""
    (rows, inner), columns = w.shape, x.shape[1]
    if w.dtype != jnp.float32:
        raise Unsupported(f"{w.dtype}: float32 only")
    if columns == 0:
        raise Unsupported("0 columns")
    if inner % _INNER or inner == 0:
        raise Unsupported(f"K = {inner}, no multiple of {_INNER}")
    runtime.require_cpu()
    parts = []
    for start in range(0, columns, MOST_COLUMNS):
        part = x[:, start:start + MOST_COLUMNS]
        out = jax.ShapeDtypeStruct((rows, part.shape[1]), jnp.float32)
        parts.append(jax.ffi.ffi_call(code(part.shape[1]).name, out)(w, part.T))
    return jnp.concatenate(parts, 1)


@functools.cache
def code(columns: int) -> Code:
    """Code for T = `columns`, made once.

    Raises:
      Unsupported: there is no code generator here.
    """

    def generate() -> object:
        from specrl_kernels.narrow_matmul.code import generate

        # 32 vector registers, or 16
        return generate(columns, (6, 4) if runtime.has("avx512f") else (2, 2))

    return runtime.register(f"specrl_narrow_matmul_{columns}", 2, generate)
