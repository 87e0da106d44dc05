"""Speed of the kernels at named real shapes, against the memory's bandwidth and what JAX offers.

    python experiments/bench_kernels.py
    python experiments/bench_kernels.py --only="xla; dot_product_attention, mask"

Of each shape: seconds of every contender, timed alternately in this process; the bytes that must be
moved, and what fraction of the measured bandwidth that is; how many times the fastest of ours is
faster than the best alternative. A contender that is refused or fails is named with the reason.
Needs jax and numpy only. Cases that --out holds are kept.
"""

import sys

from bench import bare  # isort: skip (it sets the path)

import jax
from bench import hardware, kernels
from bench.kernel_shapes import SETS

FIRST_CALL = 4.0  # seconds after which a contender is timed no further


def main() -> int:
    platform = jax.default_backend()
    default = f"bench_kernels_{platform}.json"
    flags = bare.parser(__doc__, default)
    flags.add_argument("--shapes", choices=sorted(SETS), help="which (default: the device's)")
    flags.add_argument("--only", default="", help="contenders; names hold commas, so use ;")
    flags.add_argument("--repeats", type=int, default=7)
    args = flags.parse_args()
    chosen = "tiny" if args.tiny else args.shapes or ("cpu" if platform == "cpu" else "accelerator")
    shapes = {shape.name: shape for shape in SETS[chosen]}
    results = bare.Results(args.out, default, {
        "command": bare.command(), "machine": hardware.machine()}, args.seconds)
    only = tuple(name.strip() for name in args.only.split(";") if name.strip())
    probes = hardware.probes_here(args.tiny) if results.left(shapes) else None
    for name in results.left(shapes):
        if not results.in_time():
            break
        case = kernels.measure(shapes[name], args.repeats, 1 if platform == "cpu" else 10,
                               probes, only, FIRST_CALL)
        results.add(name, case)
        print(line(name, case), flush=True)
        jax.clear_caches()
    return results.finish(shapes)


def line(name: str, case: dict) -> str:
    """One line for the terminal: microseconds, and percent of the bandwidth."""
    shown = [f"{who} {1e6 * one['seconds']['median']:.0f} us "
             f"({100 * one['bandwidth_fraction']:.0f} %)"
             for who, one in case["contenders"].items() if "seconds" in one]
    failed = [f"{who} FAILED" for who, one in case["contenders"].items() if "failed" in one]
    return f"{name}: {'; '.join(shown + failed)}"


if __name__ == "__main__":
    sys.exit(main())
