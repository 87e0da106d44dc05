"""Rollouts with random weights at Qwen2.5's shapes: speed, equal streams, no compilation.

    python experiments/gpu_rollouts.py
    python experiments/gpu_rollouts.py --models=Qwen2.5-0.5B --rows=1,64

Of each model and number of rows: plain decoding, then drafts that replay what it said, so that
nearly all are accepted, by each implementation of tree attention. A round's time is compared with
the least time in which weights and cache can be read. Needs jax, flax, optax, orbax and numpy only.
"""

import sys

from bench import bare  # isort: skip (it sets the path)

import jax
from bench import hardware, random_rollout


def main() -> int:
    platform = jax.default_backend()
    default = f"gpu_rollouts_{platform}.json"
    flags = bare.parser(__doc__, default)
    flags.add_argument("--models", default=",".join(random_rollout.QWEN))
    flags.add_argument("--rows", default="1,16,64")
    flags.add_argument("--new_tokens", type=int, default=128)
    args = flags.parse_args()
    models, rows = args.models.split(","), [int(n) for n in args.rows.split(",")]
    new, kernels = args.new_tokens, random_rollout.KERNELS[platform]
    if args.tiny:
        models, rows, new, kernels = ["tiny"], [2], 12, ()
    results = bare.Results(args.out, default, {
        "command": bare.command(), "machine": hardware.machine()}, args.seconds)
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
