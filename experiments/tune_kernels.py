"""Searches block sizes of the kernels at real shapes and writes the device's tuning table.

    python experiments/tune_kernels.py
    python experiments/tune_kernels.py --tiny --interpret --out=cpu.json    # a test of the search

Writes kernels/specrl_kernels/tuned/DEVICE.json and keeps its other rows. The search starts at the
heuristic and changes one field at a time while that gains 1 % and equals `xla`. Needs jax, numpy.
"""

import sys

from bench import standalone  # isort: skip (it sets the path)

from bench import hardware, tune
from bench.kernel_shapes import SETS
from specrl_kernels import tuning


def main() -> int:
    """Tunes the shapes that the command line names; returns the exit status."""
    device = hardware.first_device()
    kind, platform = device.device_kind, device.platform
    default = tuning.folder() / tuning.file_name(kind)
    flags = standalone.parser(__doc__, str(default.name))
    flags.add_argument("--interpret", action="store_true", help="run kernels by interpretation")
    flags.add_argument("--repeats", type=int, default=7)
    args = flags.parse_args()
    if args.interpret and args.out is None:
        raise SystemExit("--interpret: its times mean nothing; name a file with --out")
    if platform == "cpu" and not args.interpret:
        raise SystemExit("this is a cpu, where no kernel has anything to tune; --interpret shows "
                         "that the search works")
    table = tune.Table(args.out or default, kind)
    search = tune.Search(platform, args.interpret, args.repeats, args.seconds)
    for shape in SETS["tiny" if args.tiny else "accelerator"]:
        for name in tune.tunable(shape, platform, args.interpret):
            if not table.holds(shape, name, search.dtype(shape)) and search.in_time():
                row = search.best(shape, name)
                table.add(row)
                print(tune.line(shape, row), flush=True)
    print(f"wrote {table.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
