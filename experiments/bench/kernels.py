"""Times each kernel at real shapes, against memory bandwidth and what JAX offers.

    python experiments/bench.py kernels
    python experiments/bench.py kernels --only="xla; dot_product_attention, mask"

Writes results/bench_kernels_PLATFORM.json, and keeps the cases that it holds. Contenders of a shape
take turns; one that is refused or fails is named with the reason. Needs jax and numpy only.

A program runs a contender over several copies of its large arguments in sequence, like the layers
of a model, so that CPU caches hold none of them and one dispatch serves all.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels import gumbel_argmax as draws
from specrl_kernels import tree_attention as trees
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.tree_attention.api import IMPLEMENTATIONS

from . import hardware, standalone
from .hardware import Probes
from .kernel_shapes import HEADS, SETS, VOCABULARY, DrawShape, TreeShape
from .timing import alternate, seconds_of, spread

COPIES, COPIED_BYTES = 8, 1 << 30
MOST_BYTES = 8 << 30  # of temporaries that a contender may need

FIRST_CALL = 4.0  # a contender whose first call takes more seconds is not repeated

Program = Callable[..., Any]


def main() -> int:
    """Runs the shapes that the command line names; returns the exit status."""
    platform = hardware.first_device().platform
    default = f"bench_kernels_{platform}.json"
    flags = standalone.parser(__doc__, default)
    flags.add_argument("--shapes", choices=sorted(SETS), help="which (default: the device's)")
    flags.add_argument("--only", default="", help="contenders; names hold commas, so use ;")
    flags.add_argument("--repeats", type=int, default=7)
    args = flags.parse_args()
    chosen = "tiny" if args.tiny else args.shapes or ("cpu" if platform == "cpu" else "accelerator")
    shapes = {shape.name: shape for shape in SETS[chosen]}
    only = tuple(name.strip() for name in args.only.split(";") if name.strip())

    def case(name: str, results: standalone.Results, probes: Probes) -> dict[str, Any]:
        return measure(shapes[name], args.repeats, 1 if platform == "cpu" else 10, probes, only,
                       FIRST_CALL)

    return standalone.run_cases(args, default, shapes, case, line)


def line(name: str, case: dict) -> str:
    """Returns one line: microseconds, and percent of the bandwidth."""
    shown = [f"{who} {1e6 * one['seconds']['median']:.0f} us "
             f"({100 * one['bandwidth_fraction']:.0f} %)"
             for who, one in case["contenders"].items() if "seconds" in one]
    failed = [f"{who} FAILED" for who, one in case["contenders"].items() if "failed" in one]
    return f"{name}: {'; '.join(shown + failed)}"


class Impossible(Exception):
    """A contender cannot run a shape; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """`step(carry, large) -> carry`, run over copies of `large`."""

    step: Program
    carry: Any
    large: Any
    ours: bool


def dtype_of(shape: TreeShape | DrawShape, platform: str) -> Any:
    """Returns float32 for logits and on CPUs, where bfloat16 is 10 times slower; else bfloat16."""
    exact = isinstance(shape, DrawShape) or platform == "cpu"
    return jnp.float32 if exact else jnp.bfloat16


def bytes_moved(shape: TreeShape | DrawShape, dtype: Any) -> int:
    """Returns the bytes to read and write once: keys and values of cache and tree, q and output.

    A shared prompt counts once per group, though an implementation may read it more often.
    """
    item = jnp.dtype(dtype).itemsize
    if isinstance(shape, DrawShape):
        return item * shape.positions * VOCABULARY[shape.model]
    h, g, e = HEADS[shape.model]
    nodes = shape.rows * shape.nodes
    keys = int(lengths(shape).sum()) + nodes + shape.prompt * (shape.rows // shape.group)
    return item * e * (2 * g * keys + 2 * h * nodes)


def lengths(shape: TreeShape) -> np.ndarray:
    """Returns the committed tokens i32[rows]."""
    first = shape.context // 8 if shape.ragged else shape.context
    return np.linspace(first, shape.context, shape.rows).astype(np.int32)


def measure(shape: TreeShape | DrawShape, repeats: int, inner: int, probes: Probes,
            only: tuple[str, ...] = (), seconds: float = float("inf")) -> dict[str, Any]:
    """Times the contenders of one shape; returns the case of the result file.

    Args:
      repeats: timed calls of each contender, alternately.
      inner: passes over all copies per call.
      probes: measure the bandwidth before and after.
      only: names of contenders; empty is all.
      seconds: a contender whose first call takes longer is not repeated.
    """
    dtype = dtype_of(shape, jax.default_backend())
    moved, result, tasks = bytes_moved(shape, dtype), {}, {}
    copies = max(1, min(COPIES, COPIED_BYTES // moved))
    before = probes.measure()
    for name, make in contenders(shape, dtype).items():
        if only and name not in only:
            continue
        try:
            contender = make()
            task = prepared(contender, copies, inner)
            first = seconds_of(task, jax.block_until_ready)
            result[name] = {"ours": contender.ours}
            if first > seconds:
                result[name]["seconds"] = spread([first / copies / inner])
            else:
                tasks[name] = task
        except (Unsupported, Impossible) as reason:
            result[name] = {"refused": str(reason)}
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError, TypeError,
                AssertionError) as error:
            result[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    timed = alternate({name: functools.partial(seconds_of, task, jax.block_until_ready)
                       for name, task in tasks.items()}, repeats)
    for name, values in timed.items():
        result[name]["seconds"] = spread([value / copies / inner for value in values])
    bandwidth = before.best(probes.measure()).bandwidth
    for one in result.values():
        if "seconds" in one:
            one["bandwidth_fraction"] = moved / one["seconds"]["median"] / bandwidth
    return {"shape": dataclasses.asdict(shape), "dtype": str(jnp.dtype(dtype)), "bytes": moved,
            "copies": copies, "bandwidth": bandwidth, "bound_seconds": moved / bandwidth,
            "contenders": result, **_verdict(result)}


def _verdict(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the fastest of ours, the best alternative, and their ratio."""
    timed = {name: one["seconds"]["median"] for name, one in result.items() if "seconds" in one}
    ours, others = ({name: value for name, value in timed.items() if result[name]["ours"] is mine}
                    for mine in (True, False))
    if not ours or not others:
        return {}
    mine, best = min(ours, key=ours.get), min(others, key=others.get)
    return {"fastest": mine, "best_alternative": best, "times_faster": others[best] / ours[mine]}


def prepared(contender: Contender, copies: int, inner: int) -> Callable[[], Any]:
    """Returns a compiled call over `copies` of the large arguments, `inner` times."""
    def run(carry: Any, large: list[Any]) -> Any:
        def once(_: Any, carry: Any) -> Any:
            for one in large:
                carry = contender.step(carry, one)
            return carry

        return once(0, carry) if inner == 1 else jax.lax.fori_loop(0, inner, once, carry)

    large = [jax.tree.map(jnp.copy, contender.large) for _ in range(copies)]
    compiled = jax.jit(run).lower(contender.carry, large).compile()
    return lambda: compiled(contender.carry, large)


def contenders(shape: TreeShape | DrawShape, dtype: Any) -> dict[str, Callable[[], Contender]]:
    """Returns makers of contenders by name, in the order in which they run."""
    if isinstance(shape, DrawShape):
        ours = {name: functools.partial(draw_contender, shape, name)
                for name in draws.IMPLEMENTATIONS if name != "reference"}  # numpy's
        return ours | {"jax.random.categorical": functools.partial(_categorical, shape)}
    ours = {name: functools.partial(tree_contender, shape, dtype, name) for name in IMPLEMENTATIONS}
    return ours | {
        "dot_product_attention, mask": functools.partial(_dot_product, shape, dtype, None),
        "dot_product_attention, cuDNN": functools.partial(_dot_product, shape, dtype, "cudnn")}


# Tree attention.


def tree_arguments(shape: TreeShape, dtype: Any) -> dict[str, Any]:
    """Returns the arguments of `tree_attention`: binary trees, all nodes packed in order."""
    (h, g, e), b, n, s = HEADS[shape.model], shape.rows, shape.nodes, shape.context
    keys = iter(jax.random.split(jax.random.key(0), 7))
    normal = lambda *dims: jax.random.normal(next(keys), dims, dtype)  # noqa: E731
    index = np.arange(b * n, dtype=np.int32)
    parent = np.maximum(np.arange(n) - 1, 0) // 2
    groups = np.arange(b, dtype=np.int32).reshape(-1, shape.group)
    p = len(groups)
    prefix = None if not shape.prompt else trees.Prefix(
        normal(p, g, e, shape.prompt), normal(p, g, shape.prompt, e),
        jnp.full(p, shape.prompt, jnp.int32), jnp.asarray(groups))
    return {"q": normal(b * n, h, e), "row": jnp.asarray(index // n),
            "node": jnp.asarray(index % n),
            "tree_k": normal(b, n, g, e), "tree_v": normal(b, n, g, e),
            "parent": jnp.asarray(np.broadcast_to(parent, (b, n)).astype(np.int32)),
            "cache_k": normal(b, g, e, s), "cache_v": normal(b, g, s, e),
            "length": jnp.asarray(lengths(shape)), "prefix": prefix}


def tree_contender(shape: TreeShape, dtype: Any, name: str, **options: Any) -> Contender:
    """Returns one of our implementations; `options` are those of `tree_attention`."""
    (h, _, e), nodes = HEADS[shape.model], shape.rows * shape.nodes
    seen = shape.context + shape.prompt
    oracle = name == "reference"  # plain XLA, so it counts as an alternative
    needed = COPIES * 2 * 4 * nodes * seen * h * e  # XLA gathers the keys of all copies at once
    if oracle and needed > MOST_BYTES:
        raise Impossible(f"{name} would hold {needed >> 30} GiB of keys and values")
    args = tree_arguments(shape, dtype)
    q, large = args.pop("q"), {name: args.pop(name) for name in ("cache_k", "cache_v", "prefix")}

    def step(q: Any, large: Any) -> Any:
        return trees.tree_attention(q, **args, **large, scale=e**-0.5, implementation=name,
                                    **options)

    return Contender(step, q, large, ours=not oracle)


def _by_slot(shape: TreeShape, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """Returns q [B, n, H, E]; k and v [B, S + n, G, E], the tree last; visible bool[B, n, S + n].

    Each row has its own copy of a shared prompt, before its context.
    """
    args = tree_arguments(shape, dtype)
    b, n = args["parent"].shape
    k = jnp.concatenate([args["cache_k"].transpose(0, 3, 1, 2), args["tree_k"]], 1)
    v = jnp.concatenate([args["cache_v"].transpose(0, 2, 1, 3), args["tree_v"]], 1)
    prompt = shape.prompt
    if prompt:
        k, v = (jnp.concatenate([jnp.repeat(jnp.moveaxis(x, axis, 1), shape.group, 0), own], 1)
                for x, axis, own in ((args["prefix"].k.swapaxes(2, 3), 2, k),
                                     (args["prefix"].v, 2, v)))
    seen = np.eye(n, dtype=bool)
    for node, parent in enumerate(np.asarray(args["parent"][0])[1:], 1):
        seen[node] |= seen[parent]
    slots = prompt + shape.context
    context = np.arange(slots)[None] < prompt + lengths(shape)[:, None]
    visible = np.concatenate([np.broadcast_to(context[:, None], (b, n, slots)),
                              np.broadcast_to(seen, (b, n, n))], 2)
    return args["q"].reshape(b, n, *args["q"].shape[1:]), k, v, jnp.asarray(visible)


def _dot_product(shape: TreeShape, dtype: Any, implementation: str | None) -> Contender:
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise Impossible("needs a gpu")
    q, k, v, visible = _by_slot(shape, dtype)

    def step(q: Any, kv: Any) -> Any:
        return jax.nn.dot_product_attention(q, *kv, mask=visible[:, None],
                                            implementation=implementation)

    return Contender(step, q, (k, v), ours=False)


# The perturbed argmax.


def draw_arguments(shape: DrawShape) -> dict[str, Any]:
    """Returns the arguments of `gumbel_argmax` at temperature 1; logits are a head's [V, W]."""
    w = shape.positions
    logits = jax.random.normal(jax.random.key(0), (VOCABULARY[shape.model], w)) * 3
    key = np.random.default_rng(0).integers(0, 2**32, (w, 2), dtype=np.uint32)
    return {"logits": logits, "temperature": jnp.ones(w), "key": jnp.asarray(key),
            "position": jnp.arange(w, dtype=jnp.int32)}


def draw_contender(shape: DrawShape, name: str, **options: Any) -> Contender:
    """Returns one of our implementations; `options` are those of `gumbel_argmax`."""
    args = draw_arguments(shape)
    logits, position = args.pop("logits"), args.pop("position")

    def step(position: Any, logits: Any) -> Any:
        drawn = draws.gumbel_argmax(logits.T, position=position, count=shape.count,
                                    implementation=name, **args, **options)
        return _onward(position, drawn.token[:, 0], drawn.logprob[:, 0])

    return Contender(step, position, logits, ours=True)


def _categorical(shape: DrawShape) -> Contender:
    args = draw_arguments(shape)

    def step(position: Any, logits: Any) -> Any:
        scores = logits + jax.random.gumbel(jax.random.key(position[0]), logits.shape)
        token = scores.argmax(0).astype(jnp.int32) if shape.count == 1 else jax.lax.top_k(
            scores.T, shape.count)[1][:, 0]
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits, 0), token[None], 0)[0]
        return _onward(position, token, logprob)

    return Contender(step, args["position"], args["logits"], ours=False)


def _onward(position: Any, token: Any, logprob: Any) -> Any:
    """Returns positions that depend on the drawn tokens, so that draws run in sequence."""
    return (position + token + (logprob > 0)) & 1023
