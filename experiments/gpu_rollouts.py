"""Times rollouts with random weights at Qwen2.5's shapes on this device.

    python experiments/gpu_rollouts.py
    python experiments/gpu_rollouts.py --models=Qwen2.5-0.5B --rows=1,64

Writes results/gpu_rollouts_PLATFORM.json: for each model and batch size plain decoding, then drafts
that replay its tokens, with each implementation of tree attention; speed, equal tokens and rounds
over the time to read weights and cache. Needs jax, flax, optax, orbax and numpy only.
"""

import early  # noqa: F401  # isort: skip (first: Ctrl-C while the others are imported)

import sys

from bench import standalone  # isort: skip (it sets the path)

import jax
from bench import hardware, random_rollout


def main() -> int:
    """Runs the cases that the command line names; returns the exit status."""
    platform = hardware.first_device().platform
    default = f"gpu_rollouts_{platform}.json"
    flags = standalone.parser(__doc__, default)
    flags.add_argument("--models", default=",".join(random_rollout.QWEN))
    flags.add_argument("--rows", default="1,16,64")
    flags.add_argument("--new_tokens", type=int, default=128)
    args = flags.parse_args()
    models, rows = args.models.split(","), [int(n) for n in args.rows.split(",")]
    new, kernels = args.new_tokens, random_rollout.KERNELS[platform]
    if args.tiny:
        models, rows, new, kernels = ["tiny"], [2], 12, ()
    results = standalone.Results(args.out, default, {
        "command": standalone.command(), "machine": hardware.machine()}, args.seconds)
    plan = {f"{model}, {count} rows": (model, count) for model in models for count in rows}
    probes = hardware.probes_here(args.tiny) if results.left(plan) else None
    for name in results.left(plan):
        if not results.in_time():
            break
        model, count = plan[name]
        case = random_rollout.case(model, count, new, probes, results.in_time, kernels)
        results.add(name, case)
        print(random_rollout.line(name, case), flush=True)
        jax.clear_caches()
    return results.finish(plan)


if __name__ == "__main__":
    sys.exit(main())
