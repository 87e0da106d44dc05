"""Times GRPO steps of a model with random weights: without drafts, and with a head that learns.

    python experiments/bench.py steps
    python experiments/bench.py steps --model=qwen2_5_0_5b

Writes results/gpu_steps_PLATFORM.json: the seconds of each step by part, tokens/s of the policy
update and its share of the device's peak. Then the same steps again with an EAGLE-3 head that
starts from random weights and learns in each step: this shows what its training costs, not what it
gains. Needs the project's dependencies (pip install -e .); without one of them it says so and does
nothing.
"""

import gc
import itertools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specrl_jax.config import Config, load_config, override

from . import hardware, standalone

try:
    from specrl_jax.data.prompts import Prompts
    from specrl_jax.model import weights
    from specrl_jax.training.trainer import Trainer
except ModuleNotFoundError as missing:
    print(f"skipped: steps needs the package {missing.name}: pip install -e .")
    sys.exit()

STEPS = 3
HEAD_LEARNS = {"spec.drafter": "eagle", "distill.when": "interval", "distill.batch": 4,
               "distill.micro_batch": 4, "distill.updates": 1, "distill.megabytes": 8192}
ARMS = {"off": {"control.policy": "off", "spec.drafter": "off"}, "eagle, learns": HEAD_LEARNS}
SHAPES = {"prompts_per_step": 8, "group_size": 8, "rollout.batch_size": 16,
          "rollout.max_prompt_tokens": 256, "rollout.max_new_tokens": 512,
          "learner.micro_batch": 8, "learner.remat": "full", "model.dtype": "bfloat16"}
TINY = {"prompts_per_step": 2, "group_size": 2, "rollout.batch_size": 4,
        "rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 24, "learner.micro_batch": 4}
SHOWN = ("time/", "learn/tokens_per_second", "learn/mfu", "rollout/accept_length")
_calls = itertools.count()


def main() -> int:
    """Runs the arms that are left; returns the exit status."""
    default = f"gpu_steps_{hardware.first_device().platform}.json"
    flags = standalone.parser(__doc__, default)
    flags.add_argument("--model", default="qwen2_5_1_5b", help="one of random:NAME")
    args = flags.parse_args()
    model = "tiny" if args.tiny else args.model
    results = standalone.Results(args.out, default, {
        "command": standalone.command(), "machine": hardware.machine()}, args.seconds)
    plan = {f"{model}, {arm}": values for arm, values in ARMS.items()}
    for name in results.left(plan):
        if not results.in_time():
            break
        case = steps(override(config_of(model, args.tiny), plan[name]))
        results.add(name, case)
        print(f"{name}: {case['steps'][-1]}", flush=True)
        jax.clear_caches()
        gc.collect()  # a trainer's cycles hold its arrays
    return results.finish(plan)


def config_of(model: str, tiny: bool) -> Config:
    """Returns what the arms share, with drafts of 7 tokens."""
    shapes = TINY if tiny else SHAPES
    return override(load_config("tiny"), shapes | {
        "model.path": f"random:{model}", "rollout.min_batch": shapes["rollout.batch_size"],
        "learner.packing": "sequence",
        "reward.terms": (f"{__name__}:alternate",), "spec.depth": 7,
        "spec.branch": 1, "spec.nodes": 8, "spec.max_depth": 7, "spec.max_branch": 1,
        "spec.max_nodes": 8, "spec.max_packed": 8 * shapes["rollout.batch_size"],
        "control.policy": "fixed", "control.min_survival": 0.0, "distill.when": "off"})


def steps(config: Config) -> dict[str, Any]:
    """Runs the steps of one arm; returns its case of the result file."""
    source = weights.describe_source(config.model.path)
    trainer, state = Trainer.create(config, source, prompts(config))
    state, _ = trainer.compile(state)
    rows = []
    for _ in range(STEPS):
        state, metrics, _ = trainer.step(state)
        rows.append(_shown(metrics))
    return {"model": config.model.path, "sequences": config.prompts_per_step * config.group_size,
            "rows": config.rollout.batch_size, "prompt_tokens": config.rollout.max_prompt_tokens,
            "new_tokens": config.rollout.max_new_tokens, "dtype": config.model.dtype,
            "steps": rows}


def prompts(config: Config) -> Prompts:
    """Returns random prompts of the longest length, enough for all steps."""
    count = STEPS * config.prompts_per_step
    tokens = np.random.default_rng(0).integers(
        0, 256, (count, config.rollout.max_prompt_tokens)).tolist()
    return Prompts([{"id": i, "question": "", "answer": ""} for i in range(count)], [""] * count,
                   tokens)


def alternate(prompt: str, completion: str, example: Mapping[str, Any]) -> float:
    """A reward that gives each group an advantage: 0 and 1 in turn."""
    return float(next(_calls) % 2)


def _shown(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in metrics.items()
            if name.startswith(SHOWN) and isinstance(value, float)}
