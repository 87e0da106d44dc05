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
from specrl_kernels.dispatch import Unsupported

from . import hardware, standalone
from .contenders import COPIES, Contender, Impossible, contenders, lengths
from .hardware import Probes
from .kernel_shapes import FEATURES, HEADS, SETS, VOCABULARY, DrawShape, HeadShape, Shape
from .timing import alternate, seconds_of, spread

COPIED_BYTES = 1 << 30  # of copies together, at most
FIRST_CALL = 4.0  # a contender whose first call takes more seconds is not repeated


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


def dtype_of(shape: Shape, platform: str) -> Any:
    """Returns float32 for logits and on CPUs, where bfloat16 is 10 times slower; else bfloat16."""
    exact = isinstance(shape, DrawShape) or platform == "cpu"
    return jnp.float32 if exact else jnp.bfloat16


def bytes_moved(shape: Shape, dtype: Any) -> int:
    """Returns the bytes to read and write once: keys and values of cache and tree, q and output;
    logits of a draw; the weights of a head.

    A shared prompt counts once per group, though an implementation may read it more often.
    """
    item = jnp.dtype(dtype).itemsize
    if isinstance(shape, DrawShape):
        return item * shape.positions * VOCABULARY[shape.model]
    if isinstance(shape, HeadShape):
        return item * shape.vocabulary * FEATURES[shape.model]
    h, g, e = HEADS[shape.model]
    nodes = shape.rows * shape.nodes
    keys = int(lengths(shape).sum()) + nodes + shape.prompt * (shape.rows // shape.group)
    return item * e * (2 * g * keys + 2 * h * nodes)


def measure(shape: Shape, repeats: int, inner: int, probes: Probes,
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
