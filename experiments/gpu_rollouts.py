"""Times rollouts with random weights at Qwen2.5's shapes on this device.

    python experiments/gpu_rollouts.py
    python experiments/gpu_rollouts.py --models=Qwen2.5-0.5B --rows=1,64
    python experiments/gpu_rollouts.py --default --models=Qwen2.5-1.5B --rows=16

Writes results/gpu_rollouts_PLATFORM.json: for each model and batch size plain decoding, then drafts
that replay its tokens, with each implementation of tree attention; speed, equal tokens and rounds
over the time to read weights and cache. With --default the default implementation alone, into
results/gpu_default_PLATFORM.json. Needs jax, flax, optax, orbax and numpy only.
"""

import os
import sys

from bench import standalone  # isort: skip (it sets the path)

import jax
from bench import hardware, random_rollout

NO_BUFFERS = "--xla_gpu_enable_command_buffer="  # and nothing behind it, as gpu_suite.sh sets it


def main() -> int:
    """Runs the cases that the command line names; returns the exit status."""
    platform = hardware.first_device().platform
    flags = standalone.parser(__doc__, f"gpu_rollouts_{platform}.json")
    flags.add_argument("--default", action="store_true", help="only the default implementation")
    flags.add_argument("--models", default=",".join(random_rollout.QWEN))
    flags.add_argument("--rows", default="1,16,64")
    flags.add_argument("--new_tokens", type=int, default=128)
    args = flags.parse_args()
    models, rows = args.models.split(","), [int(n) for n in args.rows.split(",")]
    new, names = args.new_tokens, ("xla", *random_rollout.KERNELS[platform])
    if args.tiny:
        models, rows, new, names = ["tiny"], [2], 12, ("xla",)
    if args.default:
        names = (None,)
    stem = "gpu_default" if args.default else "gpu_rollouts"
    results = standalone.Results(args.out, f"{stem}_{platform}.json", {
        "command": standalone.command(), "machine": hardware.machine()}, args.seconds)
    more = ", default" * args.default + ", no command buffers" * (
        NO_BUFFERS in os.environ.get("XLA_FLAGS", "").split())
    plan = {f"{model}, {count} rows{more}": (model, count) for model in models for count in rows}
    probes = hardware.probes_here(args.tiny) if results.left(plan) else None
    for name in results.left(plan):
        if not results.in_time():
            break
        model, count = plan[name]
        case = random_rollout.case(model, count, new, probes, results.in_time, names)
        results.add(name, case)
        print(random_rollout.line(name, case), flush=True)
        jax.clear_caches()
    return results.finish(plan)


if __name__ == "__main__":
    sys.exit(main())
