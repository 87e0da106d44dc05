"""What the actor's draw takes: its noise, and truncation.

    python experiments/bench_draw.py

Shapes are those of verifications at SmolLM2's vocabulary. Siblings are drawn at one (row,
position), so their noise is the same: it can be made for each node, inside the draw, or once for
each pair and kept. Of each shape: seconds of the draw as it is, with kept noise, without any, and
with top-k and top-p of flat and of peaked distributions, timed alternately in this process.
"""

import sys

from bench import bare  # isort: skip (it sets the path)

import jax
from bench import draw, hardware

VOCAB = 49152


def main() -> int:
    default = f"bench_draw_{jax.default_backend()}.json"
    flags = bare.parser(__doc__, default)
    flags.add_argument("--repeats", type=int, default=30)
    args = flags.parse_args()
    shapes = {shape.name: shape for shape in draw.SHAPES}
    results = bare.Results(args.out, default, {
        "command": bare.command(), "machine": hardware.machine()}, args.seconds)
    for name in results.left(shapes):
        if not results.in_time():
            break
        case = draw.measure(shapes[name], 512 if args.tiny else VOCAB, args.repeats)
        results.add(name, case)
        print(line(name, case), flush=True)
        jax.clear_caches()
    return results.finish(shapes)


def line(name: str, case: dict) -> str:
    """One line for the terminal: milliseconds of the draw, and what others take of that."""
    others = "; ".join(f"{who} {one['median']:.2f} ({one['min']:.2f} .. {one['max']:.2f})"
                       for who, one in case["over draw"].items())
    return f"{name}: {1e3 * case['seconds']['draw']['median']:.2f} ms; {others}"


if __name__ == "__main__":
    sys.exit(main())
