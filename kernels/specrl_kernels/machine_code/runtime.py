"""Compiles kernels in the process, and calls them through XLA's interface of foreign functions."""

import ctypes
import functools
import importlib
from typing import Any, NamedTuple

import jax

from specrl_kernels.dispatch import Unsupported, traced_for


class Code(NamedTuple):
    """Machine code that is registered with XLA."""

    name: str
    engine: Any  # owns the memory of the code


def call(op: str, sizes: tuple[Any, ...], out: jax.ShapeDtypeStruct, *operands: jax.Array
         ) -> jax.Array:
    """Runs the machine code of an operation, which is made at the first call with these sizes.

    Args:
      sizes: arguments of `generate` in `specrl_kernels.OP.code`.
      out: the result's shape and dtype.

    Raises:
      Unsupported: there is no code generator here, or see `require_cpu`.
    """
    require_cpu()
    return jax.ffi.ffi_call(compiled(op, sizes, len(operands)).name, out)(*operands)


def require_cpu() -> None:
    """
    Raises:
      Unsupported: programs are not made for a CPU, or their operands may be split by XLA.
    """
    platform = traced_for().platform
    if platform != "cpu":
        raise Unsupported(f"{platform}: CPUs only")
    mesh = jax.sharding.get_abstract_mesh()
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != jax.sharding.AxisType.Manual and mesh.shape[name] > 1:
            raise Unsupported(f"the compiler may split operands over mesh axis {name!r}")


@functools.cache
def compiled(op: str, sizes: tuple[Any, ...], operands: int) -> Code:
    """Compiles code of an operation and registers it as a target of jax.ffi.ffi_call.

    Args:
      sizes: see `call`.
      operands: how many buffers it reads; it writes one.

    Raises:
      Unsupported: there is no code generator here.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError as reason:
        raise Unsupported("needs the package llvmlite: pip install llvmlite") from reason
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        raise Unsupported("needs a 64-bit CPU")
    if not has("fma"):  # LLVM would call the C library for each lane
        raise Unsupported("needs a CPU with fused multiply-add")
    from specrl_kernels.machine_code import threads

    generate = importlib.import_module(f"specrl_kernels.{op}.code").generate
    name = "_".join(map(str, ("specrl", op, *sizes)))
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    code = generate(*sizes)
    threads.add_handler(code, operands)
    module = llvm.parse_assembly(str(code))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, _machine())
    engine.finalize_object()
    address = ctypes.c_void_p(engine.get_function_address("handler"))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    return Code(name, engine)


def _machine() -> Any:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    flags = features.flatten()
    if features.get("avx512f"):
        flags += ",-prefer-256-bit"
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=flags, opt=3)


def has(feature: str) -> bool:
    """Returns whether the CPU has an x86 `feature`; 64-bit ARM has a counterpart of each."""
    import llvmlite.binding as llvm

    triple = llvm.get_default_triple()
    return triple.startswith(("aarch64", "arm64")) or bool(
        llvm.get_host_cpu_features().get(feature))
