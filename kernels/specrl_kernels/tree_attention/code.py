"""LLVM code of tree attention, built instruction by instruction with llvmlite.

`machine.py` says what it computes and in which order; `machine_code/` why it is made by hand.
"""

import dataclasses
import functools

from llvmlite import ir

from specrl_kernels.machine_code.emit import (
    FLOAT,
    I32,
    I64,
    LANES,
    POINTER,
    VECTOR,
    ZERO,
    Function,
    Number,
)

MASKED = -1e30
TOGETHER = 4  # vectors of positions whose scores are kept in registers at once
CHUNKS = 16  # of the work, about


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes that the code is generated for."""

    heads: int  # H
    kv_heads: int  # G
    head_dim: int  # E
    nodes: int  # n
    segments: tuple[int, ...]  # of the cache

    @property
    def together(self) -> int:
        """Query heads of one kv head whose sums are kept in registers at once."""
        return min(max(512 // self.head_dim, 1), self.repeats)

    @property
    def repeats(self) -> int:
        """R, query heads of one kv head."""
        return self.heads // self.kv_heads

    @property
    def group_blocks(self) -> int:
        """Units of work of one packed node and kv head; the last may repeat heads of the others."""
        return -(-self.repeats // self.together)

    @property
    def blocks(self) -> int:
        """Units of work of one packed node."""
        return self.kv_heads * self.group_blocks

    @property
    def tree_width(self) -> int:
        return -(-self.nodes // LANES) * LANES

    @property
    def scores_width(self) -> int:
        """Scores of one head: the cache's, the tree's, and a vector beyond."""
        return sum(self.segments) + self.tree_width + LANES


OPERANDS = ("q", "row", "node", "tree_k", "tree_v", "parent", "length", "slot")
"""f32[W, H, E] scaled; i32[W] twice; f32[B, G, E, n'] with n' = tree_width; f32[B, G, n, E];
i32[B, n]; i32[B] twice. Segments follow: keys f32[slots, G, E, s], values f32[slots, G, s, E]."""


def generate(heads: int, kv_heads: int, head_dim: int, nodes: int, *segments: int) -> ir.Module:
    """Returns the module, for the sizes of `Shape`; its result is f32[W, H, E]."""
    shape = Shape(heads, kv_heads, head_dim, nodes, segments)
    module = ir.Module("tree_attention")
    f = Function(module, "plan", [POINTER, POINTER])
    buffers, sizes = f.args
    packed = f.get(f.get(buffers, 1, kind=POINTER), 0, kind=I64)
    units = f.b.mul(packed, f.number(shape.blocks))
    f.b.store(units, sizes)
    f.b.store(f.b.add(f.b.sdiv(units, f.number(CHUNKS)), f.number(1)), f.at(sizes, 1, kind=I64))
    f.b.ret_void()

    exp = _exp(module)
    f = Function(module, "work", [POINTER, I64, I64])
    unit = _Unit(f, shape, exp, f.args[0])
    f.each(f.args[1], f.args[2], 1, unit.make)
    unit.close()
    return module


class _Unit:
    """Emits the work on the query heads of one packed node that share registers."""

    def __init__(self, f: Function, shape: Shape, exp: ir.Function, buffers: ir.Value) -> None:
        self.f, self.shape, self.exp = f, shape, exp
        count = len(OPERANDS) + 2 * len(shape.segments) + 1
        data = [f.get(buffers, 2 * i, kind=POINTER) for i in range(count)]
        self.operands = dict(zip(OPERANDS, data, strict=False))
        caches = data[len(OPERANDS):-1]
        half = len(shape.segments)
        self.caches = list(zip(caches[:half], caches[half:], shape.segments, strict=True))
        self.out = data[-1]
        h, floats = shape.together, shape.scores_width + shape.tree_width
        self.memory = f.call("malloc", POINTER, f.number(4 * h * floats + 4 * shape.nodes))
        self.scores = [f.at(self.memory, r * shape.scores_width) for r in range(h)]
        self.tree_scores = [f.at(self.memory, h * shape.scores_width + r * shape.tree_width)
                            for r in range(h)]
        self.path = f.at(self.memory, h * floats)

    def close(self) -> None:
        self.f.call("free", ir.VoidType(), self.memory)
        self.f.b.ret_void()

    def make(self, unit: ir.Value) -> None:
        f, shape = self.f, self.shape
        packed, block = (op(unit, f.number(shape.blocks)) for op in (f.b.sdiv, f.b.srem))
        self.group, block = (op(block, f.number(shape.group_blocks))
                             for op in (f.b.sdiv, f.b.srem))
        within = f.smaller(f.b.mul(block, f.number(shape.together)),
                           shape.repeats - shape.together)
        head = f.total((self.group, shape.repeats), within)
        place = f.total((packed, shape.heads * shape.head_dim), (head, shape.head_dim))
        self.q = f.at(self.operands["q"], place)
        self.row = f.get_index(self.operands["row"], packed)
        self.slot = f.get_index(self.operands["slot"], self.row)
        # A length beyond the cache would write beyond this unit's memory.
        self.length = f.smaller(f.get_index(self.operands["length"], self.row),
                                sum(shape.segments))
        depth = self.ancestors(f.get_index(self.operands["node"], packed))
        self.score_cache()
        self.score_tree(depth)
        weights = self.weigh(f.b.add(self.length, depth))
        self.gather(depth, weights, f.at(self.out, place))

    def ancestors(self, node: ir.Value) -> ir.Value:
        """Fills `path` with the nodes from `node` up to the root; returns their number."""
        f, b = self.f, self.f.b
        parents, before = f.at(self.operands["parent"], (self.row, self.shape.nodes)), b.block
        head, after = b.append_basic_block("climb"), b.append_basic_block("top")
        b.branch(head)
        b.position_at_end(head)
        at, count = b.phi(I64), b.phi(I64)
        b.store(b.trunc(at, I32), f.at(self.path, count, kind=I32))
        more = b.add(count, f.number(1))
        up = f.get_index(parents, at)
        for phi, first, then in ((at, node, up), (count, f.number(0), more)):
            phi.add_incoming(first, before)
            phi.add_incoming(then, head)
        # A parent that is not smaller than its node would be climbed from for ever.
        root = b.icmp_signed("==", at, f.number(0))
        full = b.icmp_signed(">=", more, f.number(self.shape.nodes))
        b.cbranch(b.or_(root, full), after, head)
        b.position_at_end(after)
        return more

    def score_cache(self) -> None:
        """Writes the scores of committed positions: sums over features in order, 16 to a vector.

        Prefetches the values, which are read next.
        """
        f, shape, start = self.f, self.shape, 0
        for keys, values, size in self.caches:
            place = (f.total((self.slot, shape.kv_heads), self.group), shape.head_dim * size)
            keys, values = f.at(keys, place), f.at(values, place)
            outs = [f.at(scores, start) for scores in self.scores]

            def score(vectors: int, p: ir.Value, keys: ir.Value = keys, values: ir.Value = values,
                      size: int = size, outs: list[ir.Value] = outs) -> None:
                self.score(f.at(keys, p), size, vectors, [f.at(out, p) for out in outs],
                           f.at(values, (p, shape.head_dim)))

            visible, wide = self.visible(start, size), TOGETHER * LANES
            whole = f.b.sub(visible, f.b.srem(visible, f.number(wide)))
            f.each(0, whole, wide, functools.partial(score, TOGETHER))
            f.each(whole, visible, LANES, functools.partial(score, 1))
            start += size

    def visible(self, start: int, size: int) -> ir.Value:
        """Returns how many positions of a segment are committed; zero or less for none."""
        return self.f.smaller(self.f.b.sub(self.length, self.f.number(start)), size)

    def score(self, keys: ir.Value, stride: int, vectors: int, outs: list[ir.Value],
              soon: ir.Value | None = None) -> None:
        """Writes the scores of positions, whose keys are columns of a matrix with rows of `stride`.

        Args:
          soon: address from which as many floats are prefetched as are read.
        """
        f, heads, width = self.f, len(outs), self.shape.head_dim

        def add(e: ir.Value, held: list[ir.Value]) -> list[ir.Value]:
            column = [f.vector(f.at(keys, (e, stride), LANES * j)) for j in range(vectors)]
            if soon is not None:
                for j in range(vectors):
                    f.fetch(f.at(soon, (e, LANES * vectors), LANES * j))
            queries = [f.spread(f.get(self.q, e, r * width)) for r in range(heads)]
            return [f.fma(queries[r], column[j], held[r * vectors + j])
                    for r in range(heads) for j in range(vectors)]

        for i, value in enumerate(f.loop(0, width, 1, [ZERO] * (heads * vectors), add)):
            f.put(value, f.at(outs[i // vectors], i % vectors * LANES))

    def score_tree(self, depth: ir.Value) -> None:
        """Writes the scores of the ancestors, by the same sums, after the committed positions'."""
        f, shape = self.f, self.shape
        scores_width = shape.tree_width
        first = f.at(self.operands["tree_k"], (
            f.total((self.row, shape.kv_heads), self.group), shape.head_dim * scores_width))
        for j in range(0, scores_width, LANES):
            self.score(f.at(first, j), scores_width, 1, [f.at(out, j) for out in self.tree_scores])

        def copy(i: ir.Value) -> None:
            node = f.get_index(self.path, f.b.sub(f.b.sub(depth, f.number(1)), i))
            for scores, tree in zip(self.scores, self.tree_scores, strict=True):
                f.put(f.get(tree, node), f.at(scores, self.length, i))

        f.each(0, depth, 1, copy)
        for scores in self.scores:
            f.put(ir.Constant(VECTOR, [MASKED] * LANES), f.at(scores, self.length, depth))

    def weigh(self, total: ir.Value) -> list[ir.Value]:
        """Turns the scores of `total` positions into weights; returns each head's sum."""
        f, sums = self.f, []
        for scores in self.scores:
            lowest = ir.Constant(VECTOR, [MASKED] * LANES)
            top, = f.loop(0, total, LANES, [lowest], lambda p, held, scores=scores: [
                f.call(f"llvm.maxnum.v{LANES}f32", VECTOR, held[0], f.vector(f.at(scores, p)))])
            top = f.spread(f.call(f"llvm.vector.reduce.fmax.v{LANES}f32", FLOAT, top))

            def weight(p: ir.Value, held: list[ir.Value], scores: ir.Value = scores,
                       top: ir.Value = top) -> list[ir.Value]:
                here = f.at(scores, p)
                value = f.b.call(self.exp, [f.b.fsub(f.vector(here), top)])
                f.put(value, here)
                return [f.b.fadd(held[0], value)]

            sums += f.loop(0, total, LANES, [ZERO], weight)
        return f.sums(sums)

    def gather(self, depth: ir.Value, totals: list[ir.Value], out: ir.Value) -> None:
        """Sums weighted values in the order of positions.

        Prefetches the keys that follow in memory, which most likely are the next unit's.
        """
        f, shape, start = self.f, self.shape, 0
        width, heads = shape.head_dim, shape.together
        held = [ZERO] * (heads * width // LANES)

        def add(values: ir.Value, place: Number, held: list[ir.Value]) -> list[ir.Value]:
            line = [f.vector(f.at(values, j)) for j in range(0, width, LANES)]
            weights = [f.spread(f.get(scores, place)) for scores in self.scores]
            return [f.fma(weights[i // len(line)], line[i % len(line)], value)
                    for i, value in enumerate(held)]

        for keys, values, size in self.caches:
            index = f.total((self.slot, shape.kv_heads), self.group)
            first = f.at(values, (index, width * size))
            later = f.at(keys, (f.b.add(index, f.number(1)), width * size))

            def add_position(p: ir.Value, held: list[ir.Value], first: ir.Value = first,
                             later: ir.Value = later, start: int = start) -> list[ir.Value]:
                for j in range(0, width, LANES):
                    f.fetch(f.at(later, (p, width), j))
                return add(f.at(first, (p, width)), f.total(p, start), held)

            held = f.loop(0, self.visible(start, size), 1, held, add_position)
            start += size
        first = f.at(self.operands["tree_v"], (
            f.total((self.row, shape.kv_heads), self.group), width * shape.nodes))

        def add_node(i: ir.Value, held: list[ir.Value]) -> list[ir.Value]:
            node = f.get_index(self.path, f.b.sub(f.b.sub(depth, f.number(1)), i))
            return add(f.at(first, (node, width)), f.total(self.length, i), held)

        held = f.loop(0, depth, 1, held, add_node)
        for i, value in enumerate(held):
            head, lane = divmod(i * LANES, width)
            f.put(f.b.fdiv(value, f.spread(totals[head])), f.at(out, head * width + lane))


def _exp(module: ir.Module) -> ir.Function:
    """Returns exp of a vector of numbers up to 0; 0 below -87. Cephes' expf (S. Moshier)."""
    f = Function(module, "exp", [VECTOR], VECTOR, internal=True)
    x, = f.args

    def same(value: float) -> ir.Constant:
        return ir.Constant(VECTOR, [value] * LANES)

    turns = f.call(f"llvm.roundeven.v{LANES}f32", VECTOR, f.b.fmul(x, same(1.44269504088896341)))
    rest = f.fma(turns, same(2.12194440e-4), f.fma(turns, same(-0.693359375), x))
    poly = same(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
                   5.0000001201e-1):
        poly = f.fma(poly, rest, same(factor))
    value = f.b.fadd(f.fma(poly, f.b.fmul(rest, rest), rest), same(1.0))
    whole = ir.VectorType(I32, LANES)
    shift = f.b.shl(f.b.fptosi(turns, whole), ir.Constant(whole, [23] * LANES))
    scaled = f.b.bitcast(f.b.add(f.b.bitcast(value, whole), shift), VECTOR)
    f.b.ret(f.b.select(f.b.fcmp_ordered("<", x, same(-87.0)), ZERO, scaled))
    return f.ir
