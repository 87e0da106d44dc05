"""FLOPs and bytes of a program from its jaxpr: one counter for all platforms, with loops counted.

XLA's own `cost_analysis` is None for a GPU, counts a loop's body once and a kernel as nothing.

FLOPs: a multiply-add of a product is two, an element of arithmetic or of a reduction one. Bytes:
what memory must move if element-wise work, broadcasts, reshapes, casts and reductions are fused
with what they are computed from. So products read their operands and write their result; what is
computed by elements is written once, where a product reads it or the program returns it; gathers
and slices read what they pick; updates write what they change. Caches, even on the chip, are not
modelled: a loop reads its constants in every round.

All is summed over the devices: a `shard_map` counts once for each part of the mesh that it is
manual over. Attention reads every allocated slot, whatever is filled: the largest branch of a
conditional counts. A kernel counts by its CostEstimate; JAX's causal attention, which has none, by
the products in its body and the blocks that it visits. A kernel that can be counted by neither, as
one that jax-triton calls, is an error.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from . import kernels

SMALL = 1024  # bytes of an array that is not counted as read by a fusion
FUSED_READS = 4  # arrays that one fusion reads before its result is written


class Work(NamedTuple):
    """What a program does, on all devices together."""

    flops: float = 0.0
    moved: float = 0.0  # bytes

    def __add__(self, other: "Work") -> "Work":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Work(self.flops + other.flops, self.moved + other.moved)

    def times(self, count: float) -> "Work":
        """Returns the work of `count` repetitions."""
        return Work(self.flops * count, self.moved * count)


class NotCounted(ValueError):
    """A kernel whose work is not known."""


class Value:
    """An array while it is counted: in memory, or fused from `reads`, which are."""

    def __init__(self, size: float, reads: "frozenset[Value] | None" = None,
                 viewed: float | None = None, part: bool = False) -> None:
        """Args: size in bytes; viewed, fewest bytes of an array that it is a view or cast of; part,
        whether it is a slice of a larger array."""
        self.size, self.reads, self.viewed, self.part = size, reads, viewed, part


def work(traced: Any, rounds: int = 1) -> Work:
    """Returns the work of a traced program, `jax.jit(f).trace(*args)`.

    Args:
      rounds: how often the body of each `while` runs, if its condition does not say so itself.
    """
    return count(traced.jaxpr, rounds)


def count(closed: core.ClosedJaxpr, rounds: int = 1) -> Work:
    """Returns the work of a jaxpr; see `work`."""
    return _Counter(rounds).body(closed.jaxpr)


class _Counter:
    def __init__(self, rounds: float) -> None:
        self.rounds, self.total = rounds, Work()

    def body(self, jaxpr: core.Jaxpr) -> Work:
        """Returns the work of a body whose arguments are in memory and whose results go there."""
        inner = _Counter(self.rounds)
        known = {var: Value(_size(var)) for var in (*jaxpr.invars, *jaxpr.constvars)}
        returned = list(dict.fromkeys(inner.inline(jaxpr, known)))
        results = [v for v in returned if v.reads is not None]
        inner.add(moved=sum(v.size for v in results) + sum(2 * v.size for v in returned if v.part))
        inner.add(moved=sum(read.size for read in frozenset().union(*(v.reads for v in results))))
        return inner.total

    def inline(self, jaxpr: core.Jaxpr, known: dict[Any, Value]) -> list[Value]:
        """Counts equations; returns the values of the results."""
        def of(atom: Any) -> Value:
            return Value(0, frozenset()) if isinstance(atom, core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            for var, value in zip(eqn.outvars, self.equation(eqn, [of(a) for a in eqn.invars]),
                                  strict=True):
                known[var] = value
        return [of(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, values: list[Value]) -> list[Value]:
        """Counts one equation; returns the values of its results."""
        name, sub = eqn.primitive.name, _called(eqn)
        if sub is not None:
            inner = dict(zip(sub.jaxpr.invars, values[len(values) - len(sub.jaxpr.invars):],
                             strict=True))
            inner |= {var: Value(_size(var)) for var in sub.jaxpr.constvars}
            return self.inline(sub.jaxpr, inner)
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, eqn, values)
        return _fused(self, eqn, values)

    def add(self, flops: float = 0.0, moved: float = 0.0) -> None:
        self.total += Work(flops, moved)

    def store(self, value: Value) -> None:
        """Counts what brings a value to memory: nothing if it is there."""
        if value.reads:
            self.add(moved=value.size + sum(read.size for read in value.reads))
        elif value.reads is not None:
            self.add(moved=value.size)
        value.reads = value.viewed = None

    def read(self, value: Value) -> None:
        """Counts what an operation that is not fused with its operand reads."""
        if value.viewed is not None or value.reads == frozenset():
            self.add(moved=value.viewed or 0.0)
            return
        self.store(value)
        self.add(moved=value.size)


def _fused(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    """Element-wise work, reductions and views: done where the result is used."""
    if _is_reshape(eqn) and values[0].reads is None:
        return [values[0]]
    name, reads = eqn.primitive.name, frozenset()
    for value in values:
        small = value.reads is None and value.size <= SMALL
        reads |= value.reads if value.reads is not None else frozenset(() if small else [value])
    if name in _ARITHMETIC or name.startswith("reduce_") or name.startswith("cum"):
        largest = max((math.prod(a.aval.shape) for a in (*eqn.invars, *eqn.outvars)), default=0)
        counter.add(flops=float(largest))
    out = [Value(_size(var), reads) for var in eqn.outvars]
    if name in _VIEWS and len(values) == 1:
        whole = values[0].viewed if values[0].reads is not None else values[0].size
        if whole is not None:
            out[0].viewed = min(whole, out[0].size) if name != "broadcast_in_dim" else whole
    if len(reads) > FUSED_READS:
        for value in out:
            counter.store(value)
    return out


def _is_reshape(eqn: Any) -> bool:
    """Returns whether an operation gives an array another shape and moves none of its bytes."""
    return eqn.primitive.name in _RESHAPES and (
        eqn.invars[0].aval.size == eqn.outvars[0].aval.size)


def _dot(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    deep = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return _apart(counter, eqn, values, 2.0 * deep * math.prod(eqn.outvars[0].aval.shape))


def _apart(counter: _Counter, eqn: Any, values: list[Value], flops: float = 0.0) -> list[Value]:
    """An operation that reads its operands from memory and writes its results there."""
    for value in values:
        counter.read(value)
    sizes = [_size(var) for var in eqn.outvars]
    counter.add(flops, sum(sizes))
    return [Value(size) for size in sizes]


def _picked(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    """A slice or gather: of an array in memory, or a gather of a view or cast of one, it is a part,
    which costs nothing until read."""
    if values[0].reads is None or eqn.primitive.name == "gather":
        if values[0].reads is not None and values[0].viewed is None:
            counter.store(values[0])
        return [Value(_size(eqn.outvars[0]), part=True)]
    return _fused(counter, eqn, values)


def _updated(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    """An update in place: writes what changes; of an array that is not in memory, all of it."""
    at = 1 if eqn.primitive.name == "dynamic_update_slice" else 2
    counter.store(values[0])
    counter.read(values[at])
    counter.add(moved=_size(eqn.invars[at]))
    return [Value(_size(eqn.outvars[0]))]


def _scan(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    return _loop(counter, eqn, values, counter.body(eqn.params["jaxpr"].jaxpr).times(
        eqn.params["length"]))


def _while(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    one = (counter.body(eqn.params["body_jaxpr"].jaxpr)
           + counter.body(eqn.params["cond_jaxpr"].jaxpr))
    trips = _trips(eqn)
    return _loop(counter, eqn, values, one.times(counter.rounds if trips is None else trips))


def _loop(counter: _Counter, eqn: Any, values: list[Value], inside: Work) -> list[Value]:
    for value in values:
        counter.store(value)
    counter.total += inside
    return [Value(_size(var)) for var in eqn.outvars]


def _cond(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    branches = [counter.body(branch.jaxpr) for branch in eqn.params["branches"]]
    most = Work(*(max(figures) for figures in zip(*branches, strict=True)))
    return _loop(counter, eqn, values[1:], most)


def _shard_map(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    mesh, inner = eqn.params["mesh"], eqn.params["jaxpr"]
    manual = eqn.params["newly_manual_axes"]
    parts = math.prod(mesh.shape[axis] for axis in manual)
    jaxpr = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
    return _loop(counter, eqn, values, counter.body(jaxpr).times(parts))


def _pallas(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    """A kernel, by its CostEstimate; without one, by its body if nothing in it is conditional.

    Raises:
      NotCounted: nobody knows how often the loops and branches of its body run.
    """
    cost, name = eqn.params.get("cost_estimate"), kernels.name(eqn)
    if cost is not None:
        found = Work(float(cost.flops), float(cost.bytes_accessed))
    elif name.startswith(kernels.CAUSAL):
        found = _causal(eqn)
    elif kernels.branches(eqn):
        raise NotCounted(f"kernel {name}: it has no CostEstimate, and loops or branches that are "
                         "not counted; give its pallas_call a cost_estimate")
    else:
        found = Work(_steps(eqn, _Counter(1)), _ends(eqn))
    for value in values:
        counter.store(value)
    counter.total += found
    return [Value(_size(var)) for var in eqn.outvars]


def _not_counted(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    raise NotCounted("a Triton program that jax-triton calls says nothing of its work: compile in "
                     "an environment without jax-triton, where the Pallas kernels are chosen")


def _causal(eqn: Any) -> Work:
    """Returns the work of JAX's causal attention, which visits no block above the diagonal.

    Splash attention leaves such steps out of its grid, whose last axis is one of blocks, and moves
    blocks as its index maps say. Loops of the Triton kernel start or end at the diagonal; what it
    reads again is in a GPU's cache, so its operands and results count once.
    """
    name, grid = kernels.name(eqn), kernels.grid(eqn)
    blocks = grid[0] if name == "mha_forward" else grid[-1]
    if not name.startswith("splash"):
        return Work(_steps(eqn, _Counter((blocks + 1) / 2)), _ends(eqn))
    share = (blocks + 1) / (2 * blocks)
    return Work(_steps(eqn, _Counter(1)) * share, kernels.moved(eqn, share))


def _steps(eqn: Any, counter: _Counter) -> float:
    """Returns the FLOPs of a kernel whose body runs at each step of its grid."""
    return counter.body(eqn.params["jaxpr"]).flops * math.prod(kernels.grid(eqn))


def _ends(eqn: Any) -> float:
    """Returns the bytes of operands and results."""
    return sum(_size(var) for var in (*eqn.invars, *eqn.outvars))


def _free(counter: _Counter, eqn: Any, values: list[Value]) -> list[Value]:
    return values[: len(eqn.outvars)]


def _trips(eqn: Any) -> int | None:
    """Returns how often a `while` runs that is a loop over numbers with literal bounds."""
    body = eqn.params["cond_jaxpr"].jaxpr
    if len(body.eqns) != 1 or body.eqns[0].primitive.name != "lt":
        return None
    start = eqn.invars[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]:]
    first, end = (_literal(atom, body.invars[eqn.params["cond_nconsts"]:], start)
                  for atom in body.eqns[0].invars)
    return None if first is None or end is None else max(int(end) - int(first), 0)


def _literal(atom: Any, carried: Sequence[Any], start: Sequence[Any]) -> Any:
    if isinstance(atom, core.Literal):
        return atom.val
    value = start[list(carried).index(atom)] if atom in carried else None
    return value.val if isinstance(value, core.Literal) else None


def _called(eqn: Any) -> core.ClosedJaxpr | None:
    """Returns the body of a call that stands for its equations."""
    if eqn.primitive.name in _LOOPS or eqn.primitive.name in _RULES:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = eqn.params.get(key)
        if isinstance(found, core.ClosedJaxpr):
            return found
        if isinstance(found, core.Jaxpr):
            return core.ClosedJaxpr(found, ())
    return None


def _size(var: Any) -> float:
    """Returns the bytes of a variable; 0 of a token or a key without a size."""
    aval = var.aval
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0.0
    item = jax.dtypes.itemsize_bits(dtype) / 8 if not jax.dtypes.issubdtype(
        dtype, jax.dtypes.extended) else 8
    return float(np.prod(aval.shape, dtype=float)) * item


_LOOPS = ("scan", "while", "cond")
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
_VIEWS = ("reshape", "transpose", "convert_element_type", "squeeze", "expand_dims", "copy",
          "broadcast_in_dim", "rev", "bitcast_convert_type", "sharding_constraint", "copy_p")
_ARITHMETIC = {
    "add", "add_any", "sub", "mul", "div", "rem", "neg", "max", "min", "abs", "sign", "floor",
    "ceil", "round", "pow", "integer_pow", "exp", "exp2", "log", "log1p", "expm1", "tanh",
    "logistic", "sqrt", "rsqrt", "cbrt", "sin", "cos", "erf", "square", "select_n", "clamp",
    "and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin",
    "shift_left", "shift_right_logical", "shift_right_arithmetic"}
Rule = Callable[[_Counter, Any, list[Value]], list[Value]]
_RULES: dict[str, Rule] = {
    "dot_general": _dot, "scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map,
    "pallas_call": _pallas, "triton_kernel_call": _not_counted, "slice": _picked,
    "dynamic_slice": _picked, "gather": _picked, "dynamic_update_slice": _updated,
    "optimization_barrier": _free}
_RULES |= dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min",
                         "scatter_max"), _updated)
_RULES |= dict.fromkeys(("sort", "top_k", "approx_top_k", "conv_general_dilated", "ffi_call",
                         "psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather",
                         "all_to_all", "ppermute", "reduce_scatter", "fft", "cholesky",
                         "triangular_solve"), _apart)
