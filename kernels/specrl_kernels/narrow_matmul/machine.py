"""Products with few columns on a CPU, by machine code made for that number of columns.

XLA's products of 2 to 64 columns repack the weights or leave the threads idle: eight columns take
almost twice the time of one. Here each weight is read once, in order, by all of XLA's threads,
while the next block is fetched (experiments/LOG.md).

Each output is a sum in one fixed order, whatever the other columns are and however many: an
output's bits depend on its row of w and its column of x alone.
"""

import ctypes
import functools
import platform
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specrl_kernels.dispatch import Unsupported

MOST_COLUMNS = 64  # beyond, XLA's product is as fast
LANES = 16  # floats of one partial sum; a CPU with narrower registers takes several


def narrow_matmul_machine(w: jax.Array, x: jax.Array) -> jax.Array:
    """See `api.narrow_matmul`."""
    (rows, inner), columns = w.shape, x.shape[1]
    if w.dtype != jnp.float32:
        raise Unsupported(f"{w.dtype}: float32 only")
    if not 1 <= columns <= MOST_COLUMNS:
        raise Unsupported(f"{columns} columns: 1 to {MOST_COLUMNS}")
    if inner % LANES or inner == 0:
        raise Unsupported(f"K = {inner}, no multiple of {LANES}")
    if jax.default_backend() != "cpu":
        raise Unsupported(f"{jax.default_backend()}: CPUs only")
    mesh = jax.sharding.get_abstract_mesh()
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != jax.sharding.AxisType.Manual and mesh.shape[name] > 1:
            raise Unsupported(f"the compiler may split w over mesh axis {name!r}")
    call = jax.ffi.ffi_call(code(columns).name, jax.ShapeDtypeStruct((rows, columns), jnp.float32))
    return call(w, x.T)


class Code(NamedTuple):
    name: str  # under which XLA finds it
    engine: Any  # which owns the memory that it lies in


@functools.cache
def code(columns: int) -> Code:
    """Code for T = `columns`, made and registered once.

    Raises:
      Unsupported: there is no code generator here.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError as reason:
        raise Unsupported("needs the package llvmlite") from reason
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        raise Unsupported("a 64-bit CPU is needed")
    from specrl_kernels.narrow_matmul.assembly import assembly

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    wide = bool(features.get("avx512f"))
    many_registers = wide or platform.machine() in ("aarch64", "arm64")
    flags = features.flatten() + (",-prefer-256-bit" if wide else "")
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=flags, opt=3)
    module = llvm.parse_assembly(assembly(columns, LANES, (6, 4) if many_registers else (2, 2)))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    name = f"specrl_narrow_matmul_{columns}"
    address = ctypes.c_void_p(engine.get_function_address("handler"))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    return Code(name, engine)
