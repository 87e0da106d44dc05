"""Times each kernel at real shapes, against memory bandwidth and what JAX offers.

    python experiments/bench.py kernels
    python experiments/bench.py kernels --only="xla; dot_product_attention, mask"

Writes results/bench_kernels_PLATFORM.json, and keeps the cases that it holds. Contenders of a shape
take turns; one that is refused or fails is named with the reason. Needs jax and numpy only.
"""

import jax

from . import hardware, kernels, standalone
from .kernel_shapes import SETS

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
    results = standalone.Results(args.out, default, {
        "command": standalone.command(), "machine": hardware.machine()}, args.seconds)
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
    """Returns one line: microseconds, and percent of the bandwidth."""
    shown = [f"{who} {1e6 * one['seconds']['median']:.0f} us "
             f"({100 * one['bandwidth_fraction']:.0f} %)"
             for who, one in case["contenders"].items() if "seconds" in one]
    failed = [f"{who} FAILED" for who, one in case["contenders"].items() if "failed" in one]
    return f"{name}: {'; '.join(shown + failed)}"
