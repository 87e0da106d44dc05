"""What the text of a compiled module shows: operations, collectives, copies, aliased buffers."""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator

from specrl_jax.structs import Json

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2,
          "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
# They cost nothing when the program runs.
QUIET = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "iota",
         "opt-barrier", "partition-id", "replica-id"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
               "ragged-all-to-all", "collective-broadcast")
COPIES = ("copy", "transpose")
# A fusion's name tells its root on a TPU (copy_fusion.2, bitcast_copy_fusion) and, after its kind,
# on a GPU (loop_transpose_fusion.1, input_transpose_fusion, wrapped_copy).
_MOVES = re.compile(r"(?:(?:loop|input|bitcast|wrapped)_)*(?:copy|transpose)(?![a-z])")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_METADATA = re.compile(r"kernel_metadata=\{[^}]*\}")  # over several lines
_CALLED = re.compile(r"\b(body|condition|to_apply|calls|true_computation|false_computation|"
                     r"branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    kind: str  # "fusion", "while", ...
    shapes: tuple[tuple[str, int], ...]  # (dtype, elements) of its results
    called: dict[str, tuple[str, ...]]  # computations by role: body, calls, ...
    on_chip: bool = False  # a result lies in the chip's own memory (a TPU's VMEM), not in HBM
    operands: tuple[str, ...] = ()
    operation: str = ""  # JAX's path of what it computes: "jit(f)/while/body/draw/add"
    cycles: int | None = None  # as a TPU's compiler estimates; it does so for most operations
    value: int | None = None  # of an integer constant, or the index of a get-tuple-element
    moved: int = 0  # bytes that a kernel says it moves
    steps: int = 0  # of a kernel's grid, and of the loop inside of one, as it says
    trips: int = 1

    @property
    def size(self) -> int:
        """Bytes of its results."""
        return sum(WIDTHS.get(dtype, 4) * count for dtype, count in self.shapes)

    @property
    def starts(self) -> str:
        """The kind without the -start of an asynchronous one."""
        return self.kind.removesuffix("-start")

    @property
    def copies(self) -> bool:
        """Whether it only moves within HBM: a copy, a transpose, or a fusion named after one."""
        if self.on_chip:
            return False
        if self.kind == "fusion":
            return bool(_MOVES.match(self.name))
        return self.starts in COPIES


@dataclasses.dataclass(frozen=True)
class Module:
    """The computations of a module by name; a fused one is not among what runs."""

    computations: dict[str, list[Instruction]]
    entry: str
    aliased: int  # parameters that share their memory with a result


def parse(text: str) -> Module:
    """Returns the module of `Compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", ""
    for line in _METADATA.sub(lambda match: match[0].replace("\n", " "), text).splitlines():
        if not line.startswith((" ", "}")) and (head := _HEAD.match(line)):
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            computations[current].append(_instruction(*match.groups()))
    header = text[: text.find("\n")]
    return Module(computations, entry, len(re.findall(r"(?:may|must)-alias", header)))


def _instruction(name: str, shape: str, kind: str, rest: str) -> Instruction:
    shapes = tuple((dtype, math.prod(int(d) for d in dims.split(",") if d))
                   for dtype, dims in _SHAPE.findall(shape))
    called = {role: tuple(re.findall(r"[\w.\-]+", names)) for role, names in _CALLED.findall(rest)}
    operation = re.search(r'op_name="([^"]*)"', rest)
    value = {"constant": re.match(r"(-?\d+)\)", rest),
             "get-tuple-element": re.search(r"index=(\d+)", rest)}.get(kind)
    cycles, moved, steps, trips = (
        int(match[1]) if (match := re.search(rf'"{word}":"?(\d+)', rest)) else None
        for word in ("estimated_cycles", "bytes_accessed", "steps", "trips"))
    return Instruction(
        name, kind, shapes, called, "S(1)" in shape,
        tuple(re.findall(r"%([\w.\-]+)", rest.split("), ")[0])),
        operation[1] if operation else "", cycles, int(value[1]) if value else None, moved or 0,
        steps or 0, trips or 1)


def operations(module: Module, name: str | None = None) -> int:
    """Returns how many operations a computation starts, a loop's body once, the largest branch."""
    return sum(_cost(module, i) for i in module.computations[name or module.entry])


def _cost(module: Module, instruction: Instruction) -> int:
    if instruction.kind in QUIET or instruction.kind.endswith(("-done", "-update")):
        return 0
    inner = [operations(module, name) for role, names in instruction.called.items()
             for name in names if name in module.computations and role in _RUNS]
    if instruction.kind == "while":
        return 1 + sum(inner)
    if instruction.kind == "conditional":
        return 1 + max(inner, default=0)
    if instruction.kind in ("call", "async-start"):
        return sum(inner)
    return 1


_RUNS = ("body", "condition", "to_apply", "calls", "true_computation", "false_computation",
         "branch_computations", "called_computations")


def running(module: Module) -> Iterator[tuple[int, Instruction]]:
    """Yields (loops around it, instruction) of all that runs, once for each place that calls it."""
    stack = [(0, module.entry)]
    while stack:
        depth, name = stack.pop()
        for instruction in module.computations.get(name, ()):
            yield depth, instruction
            if instruction.kind in ("while", "conditional", "call", "async-start"):
                deeper = depth + (instruction.kind == "while")
                stack += [(deeper, inner) for role in instruction.called
                          for inner in instruction.called[role]]


def kinds(module: Module) -> dict[str, int]:
    """Returns how many operations of each kind run, a loop's body once."""
    counts = collections.Counter(i.kind for _, i in running(module) if i.kind not in QUIET)
    return dict(counts.most_common())


def collectives(module: Module) -> dict[str, dict[str, int]]:
    """Returns kind -> {"count", "bytes"} of collectives, a loop's body once."""
    by_kind: dict[str, dict[str, int]] = {}
    for _, instruction in running(module):
        if instruction.starts in COLLECTIVES:
            one = by_kind.setdefault(instruction.starts, {"count": 0, "bytes": 0})
            one["count"] += 1
            one["bytes"] += instruction.size
    return by_kind


def large_copies(module: Module, donated: Collection[tuple[str, int]], least: int = 2**20
                 ) -> list[Json]:
    """Returns the copies of arrays that a loop carries or that were donated, the largest first.

    Args:
      donated: (dtype, elements) on one device of the arguments that were.
      least: bytes of the smallest copy that counts.
    """
    kept = set(donated)
    for _, instruction in running(module):
        if instruction.kind == "while":
            kept.update(instruction.shapes)
    counts: collections.Counter[tuple[str, int, bool]] = collections.Counter()
    for depth, instruction in running(module):
        if instruction.copies and instruction.size >= least and instruction.shapes[0] in kept:
            counts[instruction.kind, instruction.size, depth > 0] += 1
    return [{"kind": kind, "bytes": size, "in_loop": loop, "count": count}
            for (kind, size, loop), count in sorted(counts.items(), key=lambda x: -x[0][1])]
