"""LLVM code, built with llvmlite, of a product with few columns.

y[o, t] = sum over k of w[o, k] x[t, k]: w f32[O, K], x f32[T, K], y f32[O, T].
"""

import functools

from llvmlite import ir

from specrl_kernels.machine_code import runtime
from specrl_kernels.machine_code.emit import I64, LANES, POINTER, ZERO, Function, Number

CHUNK = 1 << 14  # weights that a thread takes at once, about


def generate(columns: int) -> ir.Module:
    """Returns the module for T = `columns`."""
    # Rows of w and columns of x whose sums fit into 32 vector registers, or into 16.
    tile = (6, 4) if runtime.has("avx512f") else (2, 2)
    module = ir.Module("narrow_matmul")
    _plan(module, tile[0])
    _work(module, columns, tile)
    return module


def _plan(module: ir.Module, rows: int) -> None:
    f = Function(module, "plan", [POINTER, POINTER])
    buffers, sizes = f.args
    shape = f.get(buffers, 1, kind=POINTER)  # of w
    total, inner = (f.get(shape, i, kind=I64) for i in range(2))
    blocks = f.b.add(f.b.sdiv(f.number(CHUNK), f.b.mul(inner, f.number(rows))), f.number(1))
    f.b.store(total, sizes)
    f.b.store(f.b.mul(blocks, f.number(rows)), f.at(sizes, 1, kind=I64))
    f.b.ret_void()


def _work(module: ir.Module, columns: int, tile: tuple[int, int]) -> None:
    """Rows [first, end): tiles of many rows, then of one."""
    rows, widest = tile
    groups = [(start, min(widest, columns - start)) for start in range(0, columns, widest)]
    tiles = functools.cache(functools.partial(_tile, module, columns))
    f = Function(module, "work", [POINTER, I64, I64])
    buffers, first, end = f.args
    w, x, y = (f.get(buffers, 2 * i, kind=POINTER) for i in range(3))
    inner = f.get(f.get(buffers, 1, kind=POINTER), 1, kind=I64)

    def make(many: int, row: Number) -> None:
        for q, (start, width) in enumerate(groups):
            share = (q, len(groups)) if many > 1 else (0, 1)
            f.b.call(tiles(many, width, share), [
                f.at(w, (row, inner)), f.at(x, (start, inner)), f.at(y, (row, columns), start),
                inner])

    tiled_end = f.b.sub(end, f.b.srem(f.b.sub(end, first), f.number(rows)))
    f.each(first, tiled_end, rows, functools.partial(make, rows))
    f.each(tiled_end, end, 1, functools.partial(make, 1))
    f.b.ret_void()


def _tile(module: ir.Module, columns: int, rows: int, width: int, share: tuple[int, int]
          ) -> ir.Function:
    """A function (w, x, y, K) that makes y[:rows, :width], all given by their first entry.

    Args:
      share: (q, P): these rows meet P groups of columns in turn, and the q-th asks for its part of
        the rows that come next, so that memory is asked evenly.
    """
    f = Function(module, f"tile_{rows}_{width}_{share[0]}_{share[1]}",
                 [POINTER, POINTER, POINTER, I64], internal=True)
    w, x, y, inner = f.args
    w_rows = [f.at(w, (r, inner)) for r in range(rows)]
    x_rows = [f.at(x, (c, inner)) for c in range(width)]
    ahead = f.b.mul(inner, f.number(rows))

    def add(k: ir.Value, held: list[ir.Value]) -> list[ir.Value]:
        columns_ = [f.vector(f.at(row, k)) for row in x_rows]
        out = []
        for r, row in enumerate(w_rows):
            if _fetches(r, rows, *share):
                f.fetch(f.at(row, k, ahead))
            weights = f.vector(f.at(row, k))
            out += [f.fma(weights, column, held[r * width + c])
                    for c, column in enumerate(columns_)]
        return out

    totals = f.sums(f.loop(0, inner, LANES, [ZERO] * (rows * width), add))
    for i, value in enumerate(totals):
        f.put(value, f.at(y, i // width * columns + i % width))
    f.b.ret_void()
    return f.ir


def _fetches(row: int, rows: int, q: int, groups: int) -> bool:
    if groups <= rows:
        return row % groups == q
    return row == q * rows // groups and q * rows % groups < rows
