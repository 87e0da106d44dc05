"""LLVM code, built with llvmlite, of a root-mean-square norm.

x f32[T, F], weight f32[F], y f32[T, F].
"""

from llvmlite import ir

from specrl_kernels.machine_code.emit import FLOAT, I64, LANES, POINTER, ZERO, Function

CHUNK = 1 << 13  # floats that a thread takes at once, about


def generate(features: int, eps: float) -> ir.Module:
    """Returns the module for F = `features`, a multiple of LANES."""
    module = ir.Module("rms_norm")
    f = Function(module, "plan", [POINTER, POINTER])
    buffers, sizes = f.args
    f.b.store(f.get(f.get(buffers, 1, kind=POINTER), 0, kind=I64), sizes)
    f.b.store(f.number(CHUNK // features + 1), f.at(sizes, 1, kind=I64))
    f.b.ret_void()

    f = Function(module, "work", [POINTER, I64, I64])
    x, weight, y = (f.get(f.args[0], 2 * i, kind=POINTER) for i in range(3))
    f.each(f.args[1], f.args[2], 1,
           lambda token: _token(f, features, eps, f.at(x, (token, features)), weight,
                                f.at(y, (token, features))))
    f.b.ret_void()
    return module


def _token(f: Function, features: int, eps: float, x: ir.Value, weight: ir.Value, y: ir.Value
           ) -> None:
    def add(i: ir.Value, held: list[ir.Value]) -> list[ir.Value]:
        value = f.vector(f.at(x, i))
        return [f.fma(value, value, held[0])]

    total, = f.sums(f.loop(0, features, LANES, [ZERO], add))
    mean = f.b.fadd(f.b.fdiv(total, ir.Constant(FLOAT, float(features))), ir.Constant(FLOAT, eps))
    root = f.call("llvm.sqrt.f32", FLOAT, mean)
    scale = f.spread(f.b.fdiv(ir.Constant(FLOAT, 1.0), root))

    def write(i: ir.Value) -> None:
        value = f.b.fmul(f.vector(f.at(x, i)), scale)
        f.put(f.b.fmul(value, f.vector(f.at(weight, i))), f.at(y, i))

    f.each(0, features, LANES, write)
