"""Helpers around llvmlite's builder: loops, addresses of elements, vectors of floats."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

I32, I64, FLOAT, POINTER, VOID = (ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.PointerType(),
                                  ir.VoidType())
LANES = 16  # floats of a vector; a CPU with narrower registers takes several
VECTOR = ir.VectorType(FLOAT, LANES)
ZERO = ir.Constant(VECTOR, None)
Number = int | ir.Value


class Function:
    """A function under construction; `args` are its arguments."""

    def __init__(self, module: ir.Module, name: str, args: list[ir.Type],
                 returns: ir.Type = VOID, internal: bool = False) -> None:
        self.module = module
        self.ir = ir.Function(module, ir.FunctionType(returns, args), name)
        if internal:  # no other module calls it
            self.ir.linkage = "internal"
        self.args = self.ir.args
        # Any: llvmlite has no annotations, and a type checker infers None for its operations.
        self.b: Any = ir.IRBuilder(self.ir.append_basic_block("entry"))

    def number(self, n: Number) -> ir.Value:
        return ir.Constant(I64, n) if isinstance(n, int) else n

    def total(self, *terms: tuple[Number, Number] | Number) -> ir.Value:
        """Emits the sum of numbers and of products (a, b)."""
        out = self.number(0)
        for term in terms:
            if isinstance(term, tuple):
                term = self.b.mul(self.number(term[0]), self.number(term[1]))
            out = self.b.add(out, self.number(term))
        return out

    def at(self, pointer: ir.Value, *terms: tuple[Number, Number] | Number,
           kind: ir.Type = FLOAT) -> ir.Value:
        """Emits the address of an element; its index is a sum as in `total`."""
        return self.b.gep(pointer, [self.total(*terms)], source_etype=kind)

    def get(self, pointer: ir.Value, *terms: tuple[Number, Number] | Number,
            kind: ir.Type = FLOAT) -> ir.Value:
        return self.b.load(self.at(pointer, *terms, kind=kind), typ=kind)

    def get_index(self, pointer: ir.Value, *terms: tuple[Number, Number] | Number) -> ir.Value:
        """Loads an i32 element and widens it to i64."""
        return self.b.sext(self.get(pointer, *terms, kind=I32), I64)

    def vector(self, address: ir.Value) -> ir.Value:
        return self.b.load(address, typ=VECTOR, align=4)

    def put(self, value: ir.Value, address: ir.Value) -> None:
        self.b.store(value, address, align=4)

    def spread(self, value: ir.Value) -> ir.Value:
        """Returns a vector with the value in every lane."""
        one = self.b.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))

    def call(self, name: str, returns: ir.Type, *args: Any) -> ir.Value:
        """Calls an intrinsic or a function of the C library."""
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(returns, [a.type for a in args]),
                                   name)
        return self.b.call(function, args)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """Returns x y + z, rounded once."""
        return self.call(f"llvm.fma.v{LANES}f32", VECTOR, x, y, z)

    def fetch(self, address: ir.Value) -> None:
        """Prefetches memory that will be read soon."""
        self.call("llvm.prefetch.p0", VOID, address,
                  *(ir.Constant(I32, n) for n in (0, 3, 1)))

    def smaller(self, x: Number, y: Number) -> ir.Value:
        x, y = self.number(x), self.number(y)
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def larger(self, x: Number, y: Number) -> ir.Value:
        x, y = self.number(x), self.number(y)
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def atomic_add(self, address: ir.Value, n: int) -> ir.Value:
        """Adds n to an i64 that threads share; returns what it was."""
        return self.b.atomic_rmw("add", address, self.number(n), "acq_rel")

    def repeat(self, advance: Callable[[], tuple[ir.Value, ir.Value]],
               body: Callable[[ir.Value], Any]) -> None:
        """Emits `while True: value, more = advance(); if not more: break; body(value)`."""
        b = self.b
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        value, more = advance()
        b.cbranch(more, inside, after)
        b.position_at_end(inside)
        body(value)
        b.branch(head)
        b.position_at_end(after)

    def loop(self, start: Number, stop: Number, step: int, carried: Sequence[ir.Value],
             body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]) -> list[ir.Value]:
        """Emits `for i in range(start, stop, step): carried = body(i, carried)`; returns it."""
        b, before = self.b, self.b.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        first: list[Any] = [self.number(start), *carried]
        held = [b.phi(value.type) for value in first]
        for phi, value in zip(held, first, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", held[0], self.number(stop)), inside, after)
        b.position_at_end(inside)
        new = [b.add(held[0], self.number(step)), *body(held[0], held[1:])]
        for phi, value in zip(held, new, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return held[1:]

    def each(self, start: Number, stop: Number, step: int, body: Callable[[ir.Value], Any]
             ) -> None:
        """Emits `for i in range(start, stop, step): body(i)`."""
        def discard(i: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            body(i)
            return carried

        self.loop(start, stop, step, [], discard)

    def sums(self, vectors: list[ir.Value]) -> list[ir.Value]:
        """Returns the sum of each vector's lanes: halves are added until one lane is left.

        Two vectors' halves share a vector, which does not change the order of any sum.
        """
        held, width = vectors + [ZERO] * (-len(vectors) % LANES), LANES
        kind = ir.VectorType(I32, LANES)
        while width > 1:
            half = width // 2
            lanes = [[lane for start in range(offset, 2 * LANES, width)
                      for lane in range(start, start + half)] for offset in (0, half)]
            held = [self.b.fadd(*(self.b.shuffle_vector(x, y, ir.Constant(kind, index))
                                  for index in lanes))
                    for x, y in zip(held[::2], held[1::2], strict=True)]
            width = half
        return [self.b.extract_element(held[i // LANES], ir.Constant(I32, i % LANES))
                for i in range(len(vectors))]
